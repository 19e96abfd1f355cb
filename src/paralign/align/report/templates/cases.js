// The table of cases is on the page already: filter it and order it by a column.
(() => {
  const filter = document.getElementById("filter");
  const onlyOpen = document.getElementById("failing");
  const body = document.getElementById("rows");
  const rows = [...body.rows];
  const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const passed = row.dataset.outcome === "passed";
      row.hidden = (onlyOpen.checked && passed) || !words.every((word) => text.get(row).includes(word));
      if (!row.hidden) count += 1;
    }
    document.getElementById("shown").textContent = `${count} of ${rows.length}`;
  }

  function order(at, descending) {
    const value = (row) => row.cells[at].textContent.trim();
    rows.sort((a, b) => {
      const by = value(a).localeCompare(value(b), "en", { numeric: true });
      return descending ? -by : by;
    });
    body.append(...rows);
  }

  const heads = [...document.querySelectorAll("#table thead th")];
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.ariaSort === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      order(at, descending);
    });
  });
  filter.addEventListener("input", show);
  onlyOpen.addEventListener("change", show);
  filter.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    filter.value = "";
    show();
  });
  show();
})();
