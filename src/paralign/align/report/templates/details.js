// Everything about one tensor: its numbers, where in it the error sits, and its other moments.

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

function elsewhere(tensor, tensors) {
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

// Return the nodes that tell all about one of the tensors.
function describe(tensor, tensors) {
  const zero = tensor.category === "zero_in_theory";
  const limit = tensor.budget === null || zero || !tensor.eps ? null : tensor.budget * tensor.rel / tensor.eps;
  const finite = limit !== null && Number.isFinite(limit) ? limit : null;
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
  parts.push(...elsewhere(tensor, tensors));
  return parts;
}
