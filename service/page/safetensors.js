// Reading a safetensors file: its header's length, the header as JSON, the tensors' bytes.

const ARRAYS = { F32: Float32Array, I64: BigInt64Array };

/**
 * The tensors of a file by name, each `{shape, data}`, and its metadata.
 *
 * Throws where a tensor has a type that the page does not ask for.
 */
export function readSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const start = 8 + length;
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(
    new TextDecoder().decode(new Uint8Array(buffer, 8, length)),
  );
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    if (!(dtype in ARRAYS)) throw new TypeError(`${name} has the type ${dtype}`);
    // A copy: the bytes need not be aligned in the file.
    tensors[name] = { shape, data: new ARRAYS[dtype](buffer.slice(start + from, start + to)) };
  }
  return { tensors, metadata };
}
