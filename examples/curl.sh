#!/bin/sh
# Every kind of question, asked with curl. docs/api.md describes the answers.
set -eu

url=${SEQSERVE_URL:-http://127.0.0.1:8000}

# $1: path, $2: body. A key is sent where SEQSERVE_API_KEY is set; errors end the script.
ask() {
  curl --silent --show-error --fail-with-body --no-buffer \
    ${SEQSERVE_API_KEY:+--header "authorization: Bearer $SEQSERVE_API_KEY"} \
    "$url$1" --data "$2"
  echo
}

echo '# an answer'
ask /generate '{"inputs": "transformer"}'

echo '# several inputs: several answers, in their order'
ask /generate '{"inputs": ["left", "right"]}'

echo '# the three best of a beam search'
ask /generate '{"inputs": "read", "parameters": {"num_beams": 4, "num_return_sequences": 3}}'

echo '# tokens as they come'
ask /generate_stream '{"inputs": "cat"}'

echo '# what may come next'
ask /next '{"inputs": "hello", "target_prefix": "HH", "top_k": 3}'

echo '# how likely an answer is'
ask /score '{"inputs": "read", "targets": ["R EH D", "R IY D"]}'

echo '# the largest logits behind a target'
ask /logits '{"inputs": "cat", "targets": "K AE", "top_k": 3}'

echo '# where the decoder looks'
ask /attention '{"inputs": "at", "targets": "AE", "dtype": "float16"}'

echo '# ids and back'
ask /tokenize '{"inputs": "cat"}'
ask /detokenize '{"input_ids": [23, 5, 34]}'
