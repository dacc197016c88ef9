// The hypotheses of a beam search as a tree: what they share is drawn once.

import { element } from "./dom.js";
import { label } from "./tokens.js";
import { bar, percent, probability } from "./probability.js";

const ENDED = { eos_token: "ended", stop_sequence: "stopped", length: "cut at the length limit" };

/** A beam search of its own, drawn; `onSearch(width)` gives its sequences, `onPick` takes one. */
export class BeamView {
  constructor(container, { onSearch, onPick }) {
    this.request = null; // whose hypotheses are drawn
    this.sequences = [];
    this.onPick = onPick;
    this.width = element("input", { type: "number", id: "width", min: 2, max: 64, value: 5 });
    this.tree = element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Tree of hypotheses" });
    this.note = element("p", { class: "hint", role: "status" });
    const form = element("form", {
      class: "actions",
      submit: (event) => { event.preventDefault(); onSearch(this.width.valueAsNumber); },
    }, element("label", { for: "width" }, "Beams"), this.width,
    element("button", { type: "submit" }, "Search"));
    container.append(form, this.note, this.tree);
    this.clear();
  }

  clear() {
    this.request = null;
    this.tree.replaceChildren();
    this.note.textContent = "A beam search follows several hypotheses side by side.";
  }

  begin(request) {
    this.clear();
    this.request = request;
    this.note.textContent = "Searching …";
  }

  /** The widest search that the server takes. */
  set limit(width) {
    this.width.max = width;
  }

  /** Draw the sequences of an answer, best first. */
  show(sequences) {
    const live = sequences.filter(({ details }) => details.finish_reason === "length").length;
    this.note.textContent = `${sequences.length} hypotheses, best first: ${sequences.length - live} `
      + `finished, ${live} still live at the length limit. Those dropped on the way are not returned.`;
    this.sequences = sequences.map((sequence) => withCandidates(sequence));
    const root = grown(sequences);
    this.tree.replaceChildren(element("ul", { class: "tree", dir: "auto" },
      ...[...root.children.values()].map((child) => this.branch(child))));
  }

  branch(node) {
    const steps = [node];
    let last = node;
    while (last.children.size === 1 && !last.ends.length) {
      [last] = last.children.values();
      steps.push(last);
    }
    const segment = element("span", { class: "segment" }, ...steps.map(step));
    const ends = last.ends.map((end) => this.leaf(end));
    const further = [...last.children.values()].map((child) => this.branch(child));
    const rest = [...ends, ...further];
    return element("li", {}, segment, ...(rest.length ? [element("ul", {}, ...rest)] : []));
  }

  leaf({ rank, sequence }) {
    const { score, details } = sequence;
    const ended = ENDED[details.finish_reason];
    return element("li", {}, element("button", {
      type: "button", class: rank === 1 ? "leaf best" : "leaf", title: "Look at this one",
      "aria-label": `Hypothesis ${rank}, score ${score.toFixed(3)}, ${ended}. Look at it`,
      click: () => this.onPick(rank - 1),
    }, element("b", {}, `#${rank}`), ` ${score.toFixed(3)}`, element("small", {}, ended)));
  }
}

/** A sequence with each token's alternatives beside it, as a stream tells them. */
function withCandidates(sequence) {
  const { tokens, top_tokens: others } = sequence.details;
  return { ...sequence, text: sequence.generated_text,
    tokens: tokens.map((token, i) => ({ ...token, top_tokens: others?.[i] })) };
}

/** One token of a segment. */
function step({ token }) {
  const p = probability(token.logprob);
  return element("span", {
    class: token.special ? "step special" : "step", title: percent(p),
  }, element("span", { class: "text" }, label(token)), bar(p),
  element("span", { class: "percent" }, percent(p)));
}

/** The prefix tree: a node has its token, children by id, and the sequences that end there. */
function grown(sequences) {
  const root = { children: new Map(), ends: [] };
  sequences.forEach((sequence, i) => {
    let node = root;
    for (const token of sequence.details.tokens) {
      if (!node.children.has(token.id)) {
        node.children.set(token.id, { token, children: new Map(), ends: [] });
      }
      node = node.children.get(token.id);
    }
    node.ends.push({ rank: i + 1, sequence });
  });
  return root;
}
