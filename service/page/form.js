// The form of parameters, built from their schema in the OpenAPI document.

import { element, prose } from "./dom.js";

const GROUPS = {
  "Length": ["max_new_tokens", "min_new_tokens", "truncate"],
  "Sampling": ["do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"],
  "Beam search": ["num_beams", "num_return_sequences", "length_penalty", "early_stopping"],
  "Repetition": ["repetition_penalty", "frequency_penalty", "presence_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"],
  "Constraints": ["stop", "bad_words", "logit_bias", "forced_bos_token_id", "forced_eos_token_id"],
};
const REST = "More";
const OPEN = "Sampling"; // where there is room

/** What the page decides by itself, or asks for elsewhere. */
const OWN = new Set(["task", "src_lang", "tgt_lang", "target_prefix", "target_prefix_ids", "details",
  "beam_steps", "return_full_text"]);

/** What the page asks for where a person says nothing. */
const PRESET = { top_n_tokens: "8" };

/** A value that cannot be read; the server is not asked. */
export class FieldError extends Error {
  constructor(name, message) {
    super(message);
    this.param = `parameters.${name}`;
  }
}

/** Fields for every parameter of the schema, those of a later version too. */
export class ParameterForm {
  /** `onChange` is called when a value changes. */
  constructor(container, schema, onChange) {
    const wide = matchMedia("(min-width: 961px)").matches;
    this.fields = new Map();
    this.counts = new Map();
    this.onChange = onChange;
    for (const [title, names] of grouped(Object.keys(schema.properties))) {
      const fields = names.map((name) => this.field(name, schema.properties[name]));
      const count = element("span", { class: "count" });
      this.counts.set(count, names);
      container.append(element("details", { class: "group", open: title === OPEN && wide },
        element("summary", {}, title, count), ...fields));
    }
  }

  field(name, schema) {
    const id = `parameter-${name}`;
    const { kind, attributes, choices } = widget(schema);
    const common = { id, "aria-describedby": `${id}-help ${id}-fault`, input: () => this.changed() };
    const input = controls[kind]({ ...common, ...attributes }, choices);
    if (name in PRESET) input.value = PRESET[name];
    const help = element("p", { class: "help", id: `${id}-help` }, ...prose(schema.description ?? ""));
    const fault = element("p", { class: "fault", id: `${id}-fault` });
    this.fields.set(name, { kind, input, fault, noOp: noOp(schema) });
    return element("div", { class: "field" }, element("label", { for: id }, name), input, help, fault);
  }

  /** Show what a model does where a field is left empty. */
  suit(defaults) {
    for (const [name, { input, noOp: nothing }] of this.fields) {
      const value = defaults?.[name];
      const shown = value === undefined || value === null ? nothing : JSON.stringify(value);
      if (input.tagName === "SELECT") input.options[0].textContent = shown || "default";
      else input.placeholder = shown;
    }
  }

  /** The parameters that are set. Throws a `FieldError`. */
  values() {
    const set = {};
    for (const [name, { kind, input }] of this.fields) {
      const text = input.value.trim();
      if (input.validity.badInput) throw new FieldError(name, `${name} is not a number`);
      if (text) set[name] = readers[kind](text, name);
    }
    return set;
  }

  reset() {
    for (const [name, { input }] of this.fields) input.value = PRESET[name] ?? "";
    this.changed();
  }

  changed() {
    this.blame(null);
    for (const [count, names] of this.counts) {
      const set = names.filter((name) => this.isSet(name)).length;
      count.textContent = set ? `${set} set` : "";
    }
    this.onChange();
  }

  isSet(name) {
    return this.fields.get(name).input.value !== (PRESET[name] ?? "");
  }

  get pristine() {
    return [...this.fields.keys()].every((name) => !this.isSet(name));
  }

  /** Mark the field that an error names (`parameters.top_p`); null takes the mark off. */
  blame(param, message = "") {
    for (const [name, { input, fault }] of this.fields) {
      const guilty = param !== null && new RegExp(`^parameters\\.${name}\\b`).test(param);
      fault.textContent = guilty ? message : "";
      if (guilty) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
      if (guilty) input.closest("details").open = true;
    }
  }
}

function grouped(names) {
  const left = new Set(names.filter((name) => !OWN.has(name)));
  const groups = Object.entries(GROUPS).map(([title, own]) => {
    return [title, own.filter((name) => left.delete(name))];
  });
  return [...groups, [REST, [...left]]].filter(([, own]) => own.length);
}

/** The no-op value that a description ends with. */
function noOp({ description = "" }) {
  const [, value = ""] = /No-op: ([^.,]+)/.exec(description) ?? [];
  return value === "null" ? "" : value;
}

/** Which control a schema asks for. */
function widget(schema) {
  const one = schema.anyOf?.find(({ type }) => type !== "null") ?? schema;
  if (one.enum) return { kind: "json", choices: one.enum.map((v) => JSON.stringify(v)) };
  if (one.type === "boolean") return { kind: "json", choices: ["true", "false"] };
  if (one.type === "integer" || one.type === "number") {
    const step = one.type === "integer" ? 1 : "any";
    const min = one.minimum ?? one.exclusiveMinimum;
    return { kind: "number", attributes: { min, max: one.maximum ?? one.exclusiveMaximum, step } };
  }
  if (one.type === "array" && one.items?.type !== "integer") return { kind: "lines" };
  if (one.type === "object") return { kind: "entries" };
  return { kind: one.type === "string" ? "text" : "list" };
}

const area = (hint) => (attributes) => element("textarea", {
  ...attributes, rows: 2, dir: "auto", spellcheck: "false", title: hint,
});

const controls = {
  number: (attributes) => element("input", { type: "number", inputmode: "decimal", ...attributes }),
  text: (attributes) => element("input", { type: "text", ...attributes }),
  list: (attributes) => element("input", { type: "text", title: "ids, with spaces", ...attributes }),
  lines: area("one a line"),
  entries: area("one a line, like 23: -5"),
  json: (attributes, choices) => element("select", attributes, element("option", { value: "" }),
    ...choices.map((choice) => element("option", { value: choice }, choice.replaceAll('"', "")))),
};

const lines = (text) => text.split("\n").filter((line) => line.trim());

const readers = {
  number: Number,
  text: (text) => text,
  json: (text) => JSON.parse(text),
  list: (text, name) => text.split(/[\s,]+/).map((part) => number(part, name)),
  lines,
  entries: (text, name) => Object.fromEntries(lines(text).map((line) => {
    const [, id, value] = /^\s*([^:\s]+)\s*[:\s]\s*(\S+)\s*$/.exec(line) ?? [];
    if (value === undefined) throw new FieldError(name, `${name}: "${line}" is not like 23: -5`);
    return [id, number(value, name)];
  })),
};

/** A text as a number. Throws a `FieldError`. */
function number(text, name) {
  const value = Number(text);
  if (Number.isNaN(value)) throw new FieldError(name, `${name}: "${text}" is not a number`);
  return value;
}
