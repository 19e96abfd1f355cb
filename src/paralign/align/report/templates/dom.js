// What draws a page: numbers as people read them, and nodes made one by one.

const numbers = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const number = (value) => (typeof value === "string" ? numbers[value] : value);

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
