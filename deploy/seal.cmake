# Builds SEAL, within Pyfhel, without the libraries that it would otherwise fetch: ciphertexts are not compressed then.
set(SEAL_USE_MSGSL OFF CACHE BOOL "" FORCE)
set(SEAL_USE_ZLIB OFF CACHE BOOL "" FORCE)
set(SEAL_USE_ZSTD OFF CACHE BOOL "" FORCE)
