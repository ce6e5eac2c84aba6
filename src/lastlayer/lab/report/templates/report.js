"use strict";
(() => {
  const page = JSON.parse(document.getElementById("embedded").textContent);
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const shown = new Set(page.heads);
  const views = new Map();

  // Charts: each figure shows one of its views.
  async function draw(figure, key) {
    const place = figure.querySelector(".chart");
    const name = figure.dataset.figure;
    views.get(name)?.finalize();
    const made = await vegaEmbed(place, page.charts[name][key], {
      mode: "vega", renderer: "svg", actions: false, ast: true, config: page.config,
      tooltip: { theme: "page" },
    });
    views.set(name, made);
    place.dataset.view = key;
    place.dataset.ready = "true";
    if (shown.size !== page.heads.length) await filter(made.view);
  }

  const filter = (view) => view.signal("shown", [...shown]).runAsync();

  for (const figure of all("[data-figure]")) {
    const first = figure.querySelector(".chart").dataset.view;
    draw(figure, first);
    for (const input of all(".views input", figure)) {
      input.addEventListener("change", () => {
        figure.querySelector(".chart").setAttribute("aria-label", input.dataset.alt);
        draw(figure, input.value);
      });
    }
    for (const button of all("[data-save]", figure)) {
      button.addEventListener("click", async () => {
        const name = figure.dataset.figure;
        const { view } = views.get(name);
        const kind = button.dataset.save;
        view.background("#ffffff");
        const url = await view.toImageURL(kind, 2);
        view.background(null);
        save(url, `${name}-${figure.querySelector(".chart").dataset.view}.${kind}`);
      });
    }
  }

  // The legend hides and shows heads in every chart, and in the explorer.
  const chips = all(".legend [data-head]");
  const reset = document.getElementById("show-all");
  function showHeads() {
    for (const chip of chips) {
      chip.setAttribute("aria-pressed", String(shown.has(page.heads[chip.dataset.head])));
    }
    reset.hidden = shown.size === page.heads.length;
    for (const made of views.values()) filter(made.view);
    explore();
  }
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      const name = page.heads[chip.dataset.head];
      if (!shown.delete(name)) shown.add(name);
      showHeads();
    });
  }
  reset?.addEventListener("click", () => {
    page.heads.forEach((name) => shown.add(name));
    showHeads();
    chips[0].focus();
  });

  // Headings sort the table; rows without a value stay last.
  for (const button of all("table.summary [data-sort]")) {
    button.addEventListener("click", () => {
      const heading = button.closest("th");
      const rising = heading.getAttribute("aria-sort") !== "ascending";
      all("table.summary th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const body = document.querySelector("table.summary tbody");
      const value = (row) => row.children[button.dataset.sort].dataset.value;
      const rows = all("tr", body).sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = Number.isNaN(Number(x)) ? x.localeCompare(y) : Number(x) - Number(y);
        return rising ? order : -order;
      });
      body.append(...rows);
    });
  }

  // The explorer.
  const select = document.getElementById("context");
  const make = (tag, classes, text) => {
    const node = document.createElement(tag);
    if (classes) node.className = classes;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const percent = (p) => (p === null ? "" : p >= 0.001 || p === 0 ? `${(100 * p).toFixed(1)}%` : "<0.1%");

  function card(expected) {
    const index = page.heads.indexOf(expected.head);
    const made = make("article", "card");
    const chip = chips[index];
    const title = make("h3");
    if (chip) title.append(chip.querySelector("svg").cloneNode(true));
    title.append(make("span", "", expected.head));
    made.append(title);
    const body = expected.below ? labelled(expected) : expectation(expected);
    if (chip) made.style.setProperty("--bar", chip.querySelector("svg").style.color);
    made.append(...body);
    return made;
  }

  function entry(each, width) {
    const row = make("li", each.hit ? "hit" : "");
    row.style.setProperty("--p", `${100 * width}%`);
    const token = make("span", "token", each.token);
    token.title = each.token;
    if (each.predicted !== undefined) row.append(sign(each.predicted));
    row.append(token, make("span", "p", percent(each.p)));
    return row;
  }

  // The predictions of a head for a context.
  function expectation(expected) {
    const most = Math.max(...expected.top.map((each) => each.p ?? 0), 1e-9);
    const list = make("ol");
    list.append(...expected.top.map((each) => entry(each, (each.p ?? 0) / most)));
    const made = [list];
    if (expected.target_p !== null) {
      made.unshift(make("p", "said", `${percent(expected.target_p)} for the target`));
    }
    if (expected.path.length) made.push(path(expected.path));
    return made;
  }

  // The labels that a head predicts for a row.
  function labelled(expected) {
    const { labels, predicted, found } = expected;
    const listed = (entries) => {
      const list = make("ol");
      list.append(...entries.map((each) => entry(each, each.p ?? 0)));
      return list;
    };
    const said = `${found} of ${labels} label${labels === 1 ? "" : "s"} found, ${predicted} predicted`;
    const made = [make("p", "said", said), listed(expected.top)];
    if (expected.below.length) {
      const below = make("details");
      below.open = true;
      below.append(make("summary", "", "its other labels"), listed(expected.below));
      made.push(below);
    }
    return made;
  }

  function sign(predicted) {
    const made = make("span", "sign");
    const drawn = make("span", "", predicted ? "●" : "○");
    drawn.setAttribute("aria-hidden", "true");
    made.append(drawn, make("span", "unseen", predicted ? "predicted" : "not predicted"));
    return made;
  }

  function path(choices) {
    const made = make("details");
    made.open = true;
    made.append(make("summary", "", `path to the target: ${choices.length} choice${choices.length === 1 ? "" : "s"}`));
    const list = make("ol", "path");
    for (const each of choices) {
      const step = make("li");
      step.title = `node ${each.node}, child ${each.direction}`;
      const arrow = { 0: "↙", 1: "↘" }[each.direction] ?? `${each.direction}:`;
      step.append(make("b", "", `${arrow} `), percent(each.p));
      list.append(step);
    }
    made.append(list);
    return made;
  }

  const apart = (nodes) => nodes.flatMap((node) => [node, " "]);
  const words = ({ context, target }) =>
    ["… ", ...apart(context.map((word) => make("span", "", word))), make("span", "target", target)];
  const row = ({ features, labels, more }) => {
    const names = features.map(({ name, value }) => {
      const made = make("span", "", name);
      if (value) made.append("\u00a0", make("small", "", value));
      return made;
    });
    const right = labels.map((label) => make("span", "target", label));
    const rest = right.length ? (more ? `and ${more} more` : "") : "no label";
    return [...apart(names), "→ ", ...apart(right), rest];
  };

  function explore() {
    if (!select) return;
    const chosen = page.contexts[select.value];
    document.getElementById("context-tokens").replaceChildren(...(chosen.labels ? row(chosen) : words(chosen)));
    const heads = chosen.heads.filter((each) => shown.has(each.head));
    document.getElementById("cards").replaceChildren(...heads.map(card));
  }
  if (select) {
    const move = (by) => {
      const n = page.contexts.length;
      select.value = String((Number(select.value) + by + n) % n);
      explore();
    };
    select.addEventListener("change", explore);
    document.getElementById("before").addEventListener("click", () => move(-1));
    document.getElementById("after").addEventListener("click", () => move(1));
    explore();
  }

  // Downloads.
  function save(url, name) {
    const link = document.createElement("a");
    link.href = url;
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
  }
  for (const button of all("[data-download]")) {
    button.addEventListener("click", () => {
      const kind = button.dataset.download;
      const text = kind === "csv" ? page.csv : document.getElementById("everything").textContent;
      const type = kind === "csv" ? "text/csv" : "application/json";
      const url = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
      save(url, `lastlayer-comparison.${kind}`);
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    });
  }
  const copy = document.getElementById("copy");
  copy?.addEventListener("click", async () => {
    const code = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      copy.textContent = "selected";
    }
    setTimeout(() => { copy.textContent = "copy"; }, 1500);
  });

  // Light, dark, or the system's setting. A page opened from a file may have no storage.
  const toggle = document.getElementById("theme");
  const order = ["auto", "light", "dark"];
  const recall = () => { try { return localStorage.getItem("lastlayer-theme"); } catch { return null; } };
  const remember = (name) => { try { localStorage.setItem("lastlayer-theme", name); } catch { /* no storage */ } };
  function setTheme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    document.getElementById("theme-name").textContent = name;
    toggle.setAttribute("aria-label", `Colours: ${name}`);
  }
  let theme = order.includes(recall()) ? recall() : "auto";
  setTheme(theme);
  toggle.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    setTheme(theme);
    remember(theme);
  });
})();
