// Tensors: a table to filter and order, a map to walk through, and the details of one of them.
// Text from the run only ever becomes text: nodes are made one by one, never parsed.
(() => {
  const source = document.getElementById("data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const body = document.getElementById("rows");
  const PAGE = 100;

  const word = (at) => (at === null ? null : data.words[at]);
  const numbers = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  const number = (value) => (typeof value === "string" ? numbers[value] : value);
  const WORDS = new Set(["kind", "name", "state", "category", "pairedBy"]);
  const tensors = data.rows.map((row, at) => {
    const tensor = { at };
    data.fields.forEach((field, i) => {
      tensor[field] = WORDS.has(field) ? word(row[i]) : number(row[i]);
    });
    tensor.label = tensor.state ? `${tensor.name} [${tensor.state}]` : tensor.name;
    tensor.text = `${tensor.kind} ${tensor.label}`.toLowerCase();
    return tensor;
  });

  // As the terminal writes them: 3.1, 100, 4.5e+15.
  function short(value) {
    if (Number.isNaN(value)) return "nan";
    if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
    const size = Math.abs(value);
    if (value === 0 || (size >= 0.1 && size < 1e4)) {
      return size < 1000 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
    }
    return value.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
  }
  const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;

  function make(tag, options, ...children) {
    const element = document.createElement(tag);
    Object.assign(element, options);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  // Long dotted names may break after a dot.
  function breakable(name) {
    return name.split(/(?<=[._])/).flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part]));
  }

  const SVG = "http://www.w3.org/2000/svg";
  function draw(tag, attributes) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  // ---- table

  const filter = document.getElementById("filter");
  const kind = document.getElementById("kind");
  const step = document.getElementById("step");
  const failing = document.getElementById("failing");
  const more = document.getElementById("more");
  const shown = document.getElementById("shown");
  let order = { key: null, descending: true };
  let visible = [];
  let drawn = 0;
  let current = 0;

  for (const value of new Set(tensors.map((tensor) => tensor.kind))) kind.append(new Option(value, value));
  for (const value of new Set(tensors.map((tensor) => tensor.step))) step.append(new Option(value, value));

  function strain(tensor) {
    if (tensor.budget === null) return -1;
    if (Number.isNaN(tensor.eps)) return Infinity;
    if (tensor.budget === 0) return tensor.ok ? 0 : Infinity;
    return tensor.eps / tensor.budget;
  }
  const size = (value) => (value === null ? -Infinity : Number.isNaN(value) ? Infinity : value);
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

  function worstFirst(a, b) {
    return compare(a.ok, b.ok) || compare(strain(b), strain(a)) || compare(size(b.eps), size(a.eps)) || a.at - b.at;
  }
  const texts = new Intl.Collator("en", { numeric: true });
  function byColumn(a, b) {
    const [left, right] = [a[order.key], b[order.key]];
    const by = typeof left === "string" ? texts.compare(a.label, b.label) * (order.key === "name") || texts.compare(left, right)
      : compare(size(left), size(right));
    return (order.descending ? -by : by) || a.at - b.at;
  }

  function line(tensor) {
    const cell = (text, name) => make("td", { className: name || "" }, text);
    const row = make("tr", { className: tensor.ok ? "" : "bad", tabIndex: -1 },
      cell(tensor.kind),
      make("td", { className: "name" }, ...breakable(tensor.label)),
      cell(String(tensor.step), "num"),
      cell(short(tensor.eps), "num"),
      cell(tensor.budget === null ? "listed" : short(tensor.budget), "num"),
      cell(tensor.cosine === null ? "" : tensor.cosine.toFixed(6), "num"),
      cell(tensor.scale === null ? "" : String(Number(tensor.scale.toPrecision(6))), "num"));
    row.dataset.row = tensor.at;
    row.classList.toggle("open-row", true);
    return row;
  }

  function drawMore() {
    const next = visible.slice(drawn, drawn + PAGE);
    body.append(...next.map(line));
    drawn += next.length;
    more.hidden = drawn >= visible.length;
    more.textContent = `Show ${Math.min(PAGE, visible.length - drawn)} more of ${visible.length}`;
  }

  function refresh() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    visible = tensors.filter((tensor) =>
      (!kind.value || tensor.kind === kind.value)
      && (!step.value || tensor.step === Number(step.value))
      && (!failing.checked || !tensor.ok)
      && words.every((part) => tensor.text.includes(part)));
    visible.sort(order.key ? byColumn : worstFirst);
    body.replaceChildren();
    drawn = 0;
    drawMore();
    shown.textContent = `${visible.length.toLocaleString("en")} of ${tensors.length.toLocaleString("en")}`;
    current = 0;
    if (body.rows.length) body.rows[0].tabIndex = 0;
  }

  function focusRow(at) {
    const wanted = Math.max(0, Math.min(at, visible.length - 1));
    while (wanted >= drawn && drawn < visible.length) drawMore();
    if (body.rows[current]) body.rows[current].tabIndex = -1;
    current = wanted;
    const row = body.rows[current];
    if (!row) return;
    row.tabIndex = 0;
    row.focus();
  }

  body.addEventListener("keydown", (event) => {
    const at = [...body.rows].indexOf(event.target.closest("tr"));
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 20, PageUp: at - 20, Home: 0, End: visible.length - 1 };
    if (event.key in moves && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      if (event.key === "ArrowUp" && at === 0) filter.focus();
      else focusRow(moves[event.key]);
    } else if (event.key === "Enter") {
      event.preventDefault();
      open(visible[at].at);
    }
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (!row || String(getSelection())) return;
    focusRow([...body.rows].indexOf(row));
    open(Number(row.dataset.row));
  });
  filter.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      filter.value = "";
      refresh();
    } else if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      focusRow(0);
    }
  });
  filter.addEventListener("input", refresh);
  for (const control of [kind, step, failing]) control.addEventListener("change", refresh);
  more.addEventListener("click", () => {
    const first = drawn;
    drawMore();
    focusRow(first);
  });

  const heads = [...document.querySelectorAll("#table thead th")];
  for (const head of heads) {
    const button = make("button", { type: "button" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const key = head.dataset.key;
      const isText = key === "kind" || key === "name";
      order = { key, descending: order.key === key ? !order.descending : !isText };
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
      refresh();
    });
  }

  // ---- map

  const boxes = [...document.querySelectorAll("[data-heat]")];
  const tabs = [...document.querySelectorAll("[data-map]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => {
      for (const other of tabs) other.setAttribute("aria-pressed", String(other === tab));
      for (const box of boxes) box.hidden = box.dataset.heat !== tab.dataset.map;
    });
  }
  for (const box of boxes) {
    const cells = [...box.querySelectorAll("td[data-row]")];
    if (cells.length) cells[0].tabIndex = 0;
    for (const cell of cells.slice(1)) cell.tabIndex = -1;
    const name = (event) => {
      const cell = event.target.closest("td[data-row]");
      if (!cell || cell.title) return;
      const tensor = tensors[Number(cell.dataset.row)];
      cell.title = `${tensor.label}, step ${tensor.step}: ${short(tensor.eps)} eps, ${tensor.ok ? "in" : "out of"} budget`;
      cell.setAttribute("aria-label", cell.title);
    };
    box.addEventListener("focusin", name);
    box.addEventListener("mouseover", name);
    box.addEventListener("keydown", (event) => {
      const cell = event.target.closest("td[data-row]");
      if (!cell) return;
      if (event.key === "Enter") {
        event.preventDefault();
        open(Number(cell.dataset.row));
        return;
      }
      const moves = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const [down, right] = moves[event.key];
      const grid = cell.closest("tbody").rows;
      let [y, x] = [cell.parentElement.sectionRowIndex + down, cell.cellIndex + right];
      // Layers differ in what they have: step over the gaps.
      while (grid[y] && grid[y].cells[x] && !grid[y].cells[x].dataset.row) [y, x] = [y + down, x + right];
      const target = grid[y] && grid[y].cells[x];
      if (!target || !target.dataset.row) return;
      cell.tabIndex = -1;
      target.tabIndex = 0;
      target.focus();
    });
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-row], .heat td[data-row]");
    if (!link) return;
    event.preventDefault();
    open(Number(link.dataset.row));
  });

  // ---- details

  const dialog = document.getElementById("detail");
  const title = document.getElementById("detail-title");
  const detail = document.getElementById("detail-body");
  let opened = 0;

  function facts(pairs) {
    const list = make("dl", { className: "evidence" });
    for (const [name, value] of pairs) {
      if (value === null) continue;
      list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    }
    return list;
  }

  // Relative errors on a logarithmic scale: what is above the budget is coloured as wrong.
  // The strip below says where most of the error is, which is where the tensor itself is large too.
  function bars(values, shares, limit, label, names, labels) {
    const [width, height, strip] = [640, 90, 12];
    const positive = values.filter((value) => value > 0 && Number.isFinite(value));
    const tops = [...positive, limit || 0].filter((value) => value > 0);
    const top = Math.log10(Math.max(...tops, 1e-300)) + 0.2;
    const bottom = Math.min(Math.log10(Math.min(...tops, 1e300)) - 0.5, top - 2);
    const level = (value) => height * (top - Math.log10(value)) / (top - bottom);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height + strip + (labels ? 18 : 0)}`, class: "bars", role: "img", "aria-label": label });
    const each = Math.min(width / values.length, 64);
    values.forEach((value, at) => {
      const known = Number.isFinite(value);
      const y = !known ? 0 : value > 0 ? Math.min(level(value), height - 2) : height - 2;
      const wrong = !known ? "none" : limit !== null && !(value <= limit) ? "over" : "";
      const bar = draw("rect", { x: at * each + 1, y, width: Math.max(each - 2, 1), height: height - y, class: wrong });
      const share = shares[at];
      const mark = draw("rect", { x: at * each + 1, y: height + 3, width: Math.max(each - 2, 1), height: strip - 4, class: "share", opacity: 0.06 + 0.94 * Math.min(1, share / Math.max(...shares, 1)) });
      if (labels) {
        const text = draw("text", { x: (at + 0.5) * each, y: height + strip + 13, "text-anchor": "middle" });
        text.textContent = labels[at];
        svg.append(text);
      }
      for (const part of [bar, mark]) {
        const tip = draw("title", {});
        tip.textContent = `${names[at]}: relative error ${short(value)}, ${share} % of all error`;
        part.append(tip);
        svg.append(part);
      }
    });
    if (limit) svg.append(draw("line", { x1: 0, x2: width, y1: level(limit), y2: level(limit) }));
    return svg;
  }

  function profile(tensor, limit) {
    const parts = [make("h3", {}, "Where in the tensor")];
    const found = tensor.profile;
    if (!found) {
      parts.push(make("p", { className: "note" }, "Not looked at closer: many tensors fail before this one, or it holds whole numbers."));
      return parts;
    }
    if (found.places.length) {
      parts.push(make("ul", { className: "places" }, ...found.places.map((text) => make("li", {}, text))));
    } else {
      parts.push(make("p", { className: "note" }, "The error is spread over all of it."));
    }
    for (const [name, length, starts, errors, shares] of found.dims) {
      const first = starts || errors.map((_, at) => at);
      const names = first.map((start, at) => {
        const stop = (first[at + 1] === undefined ? length : first[at + 1]) - 1;
        return `${name} ${start === stop ? start : `${start}-${stop}`}`;
      });
      parts.push(make("p", { className: "key" }, `${name}: relative error, logarithmic; below, the share of all error`));
      parts.push(bars(errors.map(number), shares, limit, `Relative error along ${name}`, names));
      parts.push(make("div", { className: "axis-ends" }, make("span", {}, "0"), make("span", {}, String(length - 1))));
    }
    if (found.ranks.length > 1) {
      parts.push(make("p", { className: "key" }, "ranks: relative error of what each holds; below, the share of all error"));
      const names = found.ranks.map(([rank, , , part]) => `rank ${rank}, [${part.map((ends) => ends.join(":")).join(", ")}]`);
      parts.push(bars(found.ranks.map(([, error]) => number(error)), found.ranks.map(([, , share]) => share), limit, "Relative error by rank", names, found.ranks.map(([rank]) => String(rank))));
    }
    return parts;
  }

  function elsewhere(tensor) {
    const same = tensors.filter((other) => other.name === tensor.name && other.at !== tensor.at);
    if (!same.length) return [];
    const rows = same.map((other) => {
      const link = make("a", { href: "#tensors" }, other.state ? `${other.kind} [${other.state}]` : other.kind);
      link.dataset.row = other.at;
      return make("tr", { className: other.ok ? "" : "bad" }, make("td", {}, link),
        make("td", { className: "num" }, String(other.step)), make("td", { className: "num" }, short(other.eps)),
        make("td", { className: "num" }, other.budget === null ? "listed" : short(other.budget)));
    });
    const head = make("tr", {}, ...["kind", "step", "eps", "budget"].map((name, at) =>
      make("th", { scope: "col", className: at ? "num" : "" }, name)));
    const table = make("table", { className: "tensors" }, make("thead", {}, head), make("tbody", {}, ...rows));
    return [make("h3", {}, "The same name elsewhere"), make("div", { className: "scroll" }, table)];
  }

  function fill(tensor) {
    const zero = tensor.category === "zero_in_theory";
    const limit = tensor.budget === null || zero || !tensor.eps ? null : tensor.budget * tensor.rel / tensor.eps;
    const finite = limit !== null && Number.isFinite(limit) ? limit : null;
    title.replaceChildren(...breakable(tensor.label));
    const parts = [
      make("p", { className: tensor.ok ? "big" : "big bad-text" }, `${short(tensor.eps)} eps`),
      make("p", { className: "note" }, tensor.budget === null ? "Listed, not gated."
        : `${tensor.ok ? "In" : "Out of"} its budget of ${short(tensor.budget)} eps.`),
      facts([
        ["kind", tensor.kind],
        ["step", String(tensor.step)],
        ["relative error", short(tensor.rel)],
        ["cosine", tensor.cosine === null ? null : String(tensor.cosine)],
        ["best scale", tensor.scale === null ? null : String(tensor.scale)],
        ["paired by", tensor.pairedBy],
        ["beyond allclose(2e-3)", tensor.share ? percent(tensor.share) : null],
        ["worst element", tensor.index ? `[${tensor.index.join(", ")}]` : null],
        ["expected", tensor.values ? String(number(tensor.values[0])) : null],
        ["found", tensor.values ? String(number(tensor.values[1])) : null],
        ["ranks out of budget", tensor.ranks.length ? tensor.ranks.join(", ") : null],
      ]),
    ];
    if (zero) parts.push(make("p", { className: "note" }, "Zero in theory: measured in eps of the global gradient norm."));
    if (!tensor.ok && tensor.index) parts.push(...profile(tensor, finite));
    parts.push(...elsewhere(tensor));
    detail.replaceChildren(...parts);
  }

  function open(at) {
    opened = at;
    fill(tensors[at]);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
    detail.focus({ preventScroll: true });
  }

  // Neighbours as the table shows them, whichever way this one was opened.
  function neighbour(by) {
    const place = visible.findIndex((tensor) => tensor.at === opened);
    const target = visible[place + by];
    if (target) open(target.at);
  }
  document.getElementById("close").addEventListener("click", () => dialog.close());
  document.getElementById("previous").addEventListener("click", () => neighbour(-1));
  document.getElementById("next").addEventListener("click", () => neighbour(1));
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  dialog.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    neighbour(event.key === "ArrowDown" ? 1 : -1);
  });

  refresh();
})();
