// The tokens of an answer, each with its probability and its alternatives.

import { arrows, element } from "./dom.js";
import { bar, percent, probability } from "./probability.js";

const LINGER = 250; // milliseconds in which the pointer may travel from a token to its alternatives
const MARGIN = 8;

/** What a token shows: spaces around it are the gaps between tokens. */
export function label(token) {
  if (token.text === null) return `#${token.id}`;
  return token.text.replaceAll("\n", "↵").trim() || "␣";
}

/**
 * A row of tokens, with a box of alternatives under the one at hand.
 *
 * `onChoose(index, alternative)` is called when a person picks one to continue from.
 */
export class TokenStrip {
  constructor(container, onChoose) {
    this.onChoose = onChoose;
    this.tokens = [];
    this.list = element("div", {
      class: "strip", role: "group", dir: "auto",
      "aria-label": "Tokens. Arrow keys move along, Enter opens the alternatives",
    });
    this.box = element("div", { class: "alternatives", hidden: true });
    this.hint = element("p", { class: "hint" });
    this.place = element("div", { class: "place" }, this.list, this.box);
    container.append(this.place, this.hint);
    arrows(this.list, () => [...this.list.children]);
    arrows(this.box, () => [...this.box.querySelectorAll("button")], "ArrowUp", "ArrowDown");
    this.place.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.leave();
    });
    this.place.addEventListener("pointerleave", () => this.closeSoon());
    this.place.addEventListener("focusout", (event) => {
      if (!this.place.contains(event.relatedTarget)) this.closeSoon();
    });
    this.clear();
  }

  clear() {
    this.close();
    this.tokens = [];
    this.list.replaceChildren();
    this.hint.textContent = "Each token will stand here with its probability, and with what the "
      + "model might have said instead.";
  }

  /** Show another answer. */
  show(tokens) {
    this.clear();
    tokens.forEach((token) => this.add(token));
  }

  /** One token more: `{id, text, logprob, special, top_tokens, kept, chosen}`. */
  add(token) {
    const index = this.tokens.push(token) - 1;
    this.list.append(this.chip(token, index));
    this.hint.textContent = "Point at a token, or tap it, to see its alternatives; pick one to "
      + "continue from there.";
  }

  chip(token, index) {
    const p = probability(token.logprob);
    const begins = index === 0 || token.special || token.chosen || token.text === null
      || /^\s/.test(token.text);
    const classes = ["token", begins && "begins", token.special && "special",
      token.kept && "kept", token.chosen && "chosen"].filter(Boolean);
    const notes = [token.special && "special", token.chosen && "your choice"].filter(Boolean);
    return element("button", {
      type: "button", class: classes.join(" "), tabindex: index === 0 ? "0" : "-1",
      "aria-haspopup": "true", "aria-expanded": "false",
      "aria-label": [label(token), percent(p), ...notes].join(", "),
      pointerenter: () => this.open(index),
      focus: () => this.open(index),
      click: () => this.open(index),
      keydown: (event) => { if (["Enter", "ArrowDown"].includes(event.key)) this.enter(event); },
    }, element("span", { class: "text" }, label(token)), bar(p),
    element("span", { class: "percent" }, percent(p)));
  }

  enter(event) {
    event.preventDefault();
    this.box.querySelector("button")?.focus();
  }

  open(index) {
    clearTimeout(this.closing);
    if (this.at === index) return;
    this.close();
    this.at = index;
    const chip = this.list.children[index];
    for (const other of this.list.children) other.tabIndex = other === chip ? 0 : -1;
    chip.setAttribute("aria-expanded", "true");
    this.box.replaceChildren(...this.choices(index));
    this.box.hidden = false;
    this.put(chip);
  }

  /** The box goes under its token, within the page. */
  put(chip) {
    const room = this.place.clientWidth - this.box.offsetWidth;
    const left = Math.max(0, Math.min(chip.offsetLeft, room));
    this.box.style.left = `${left}px`;
    this.box.style.top = `${chip.offsetTop + chip.offsetHeight + MARGIN / 2}px`;
  }

  choices(index) {
    const token = this.tokens[index];
    const heading = element("p", {}, `Position ${index + 1} · id ${token.id}`);
    const others = token.top_tokens ?? [];
    if (!others.length) {
      return [heading, element("p", { class: "hint" }, "top_n_tokens is 0: no alternatives.")];
    }
    return [heading, ...others.map((other) => this.choice(index, other))];
  }

  choice(index, other) {
    const p = probability(other.logprob);
    const same = other.id === this.tokens[index].id;
    return element("button", {
      type: "button", class: "alternative", "aria-current": same ? "true" : null,
      "aria-label": `${label(other)}, ${percent(p)}${same ? ", taken" : ", continue from here"}`,
      click: () => { this.close(); this.onChoose(index, other); },
    }, element("span", { class: "text", dir: "auto" }, same ? "✓ " : "", label(other)), bar(p),
    element("span", { class: "percent" }, percent(p)));
  }

  closeSoon() {
    clearTimeout(this.closing);
    this.closing = setTimeout(() => {
      if (!this.place.matches(":hover") && !this.place.contains(document.activeElement)) this.close();
    }, LINGER);
  }

  close() {
    clearTimeout(this.closing);
    this.list.children[this.at]?.setAttribute("aria-expanded", "false");
    this.at = undefined;
    this.box.hidden = true;
  }

  /** Close the box and go back to its token. */
  leave() {
    const chip = this.list.children[this.at];
    if (chip) chip.focus(); // which leaves the box open
    this.close();
  }
}
