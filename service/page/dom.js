// Making elements. Styles are set through the CSSOM only: the page's policy forbids style attributes.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An HTML element: functions among the attributes listen, null and false ones are left out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children);
  return made;
}

/** Text whose `back-ticked` parts become code. */
export function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

/** Let the arrow keys move the focus among what `items` gives; Home and End go to its ends. */
export function arrows(container, items, back = "ArrowLeft", forward = "ArrowRight") {
  container.addEventListener("keydown", (event) => {
    const all = items();
    const now = all.indexOf(document.activeElement);
    const last = all.length - 1;
    const mirrored = back === "ArrowLeft" && getComputedStyle(container).direction === "rtl";
    const ahead = mirrored ? -1 : 1;
    const next = { [back]: now - ahead, [forward]: now + ahead, Home: 0, End: last }[event.key];
    if (now < 0 || next === undefined) return;
    event.preventDefault();
    all[Math.min(Math.max(next, 0), last)].focus();
  });
}
