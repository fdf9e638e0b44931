"""Runs llama.cpp's server of a GGUF file until standard input ends. Prints its address.

    python llama_cpp_server.py FILE CONTEXT SEQUENCES THREADS f32|bf16
"""

import sys

import xllamacpp


def main():
    path, context, sequences, threads, dtype = sys.argv[1:]
    options = xllamacpp.CommonParams()
    options.model.path = path
    options.n_ctx = int(context) * int(sequences)
    options.n_parallel = int(sequences)
    options.n_batch = options.n_ubatch = 512
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = int(threads)
    kind = {"f32": xllamacpp.ggml_type.GGML_TYPE_F32, "bf16": xllamacpp.ggml_type.GGML_TYPE_BF16}[dtype]
    options.cache_type_k = options.cache_type_v = kind
    options.port = 0
    server = xllamacpp.Server(options)
    print(server.listening_address.rstrip("/") + "/", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
