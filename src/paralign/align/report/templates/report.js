// Tensors: a table to filter and order, a map to walk through, and the details of one of them.
// Text from the run only ever becomes text: nodes are made one by one, never parsed.
(() => {
  const source = document.getElementById("data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const body = document.getElementById("rows");
  const PAGE = 100;

  const word = (at) => (at === null ? null : data.words[at]);
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

  function open(at) {
    opened = at;
    title.replaceChildren(...breakable(tensors[at].label));
    detail.replaceChildren(...describe(tensors[at], tensors));
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
