// A request as something to paste: a curl command, a program with the Python client.

/** A command for a POSIX shell. */
export function curl(url, path, body, guarded) {
  const lines = [`curl ${url}/${path}`];
  if (guarded) lines.push('-H "authorization: Bearer $SEQSERVE_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

/** A program with `seqserve.Client`. */
export function python(url, body, guarded) {
  const { inputs, input_ids: ids, parameters, model } = body;
  const given = [literal(inputs ?? ids), literal(parameters)];
  if (model) given.push(`model=${literal(model)}`);
  return [
    "from seqserve import Client",
    "",
    ...(guarded ? ["# The key is taken from the variable SEQSERVE_API_KEY."] : []),
    `with Client(${literal(url)}) as client:`,
    `    answer = client.generate(${given.join(", ")})`,
    "    print(answer.generated_text)",
  ].join("\n");
}

/** A text as one word of a shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const NAMES = new Map([[null, "None"], [true, "True"], [false, "False"]]);

/** A JSON value as Python writes it. A JSON string is a Python string, and so is a number. */
function literal(value) {
  if (NAMES.has(value)) return NAMES.get(value);
  if (Array.isArray(value)) return `[${value.map((item) => literal(item)).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${literal(v)}`);
  return `{${entries.join(", ")}}`;
}
