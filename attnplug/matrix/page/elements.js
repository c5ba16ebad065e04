// Making elements. Texts of the data go in as text nodes, never as markup.

const byId = (id) => document.getElementById(id);

/** An element with properties, attributes (keys with "-", and role) and listeners (on...); null children are left out. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** The mark of a status, which its word always stands beside. */
function mark(status) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "mark");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#mark-${statusClass(status)}`);
  svg.append(use);
  return svg;
}

/** The word of a status as a class name and a mark's name. */
function statusClass(status) {
  return statuses[status].word.replace(" ", "-");
}

/** A mark with its word. */
function badge(status, after = "") {
  const word = make("span", { className: "word" }, statuses[status].word);
  return make(
    "span",
    { className: `badge is-${statusClass(status)}` },
    mark(status),
    word,
    after ? make("small", {}, after) : null,
  );
}

/** A number as people write it. */
const count = new Intl.NumberFormat("en").format;

/** "1 cell", "2,835 cells". */
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
