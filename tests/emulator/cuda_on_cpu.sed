# sed -f tests/emulator/cuda_on_cpu.sed KERNELS.cu: rewrites the CUDA syntax that is not C++, for
# tests/emulator/cuda_on_cpu.h. Line numbers do not change, so that messages can give them:
#   { echo '#line 1 "KERNELS.cu"'; sed -f tests/emulator/cuda_on_cpu.sed KERNELS.cu; } | g++ -x c++ ... -

# The whole file at once: a launch may be broken over several lines.
:read
$!{
N
b read
}

# CUDA's headers, which tests/emulator/cuda_on_cpu.h replaces, and pragmas of nvcc.
s|#include[ \t]*<cuda[^>\n]*>|// &|g
s|#include[ \t]*<nvtx[^>\n]*>|// &|g
s|#pragma[ \t]\+unroll|// &|g

# Shared memory is aligned to 128 bytes anyway.
s/__shared__[ \t]\+\(__align__\|alignas\)([^()]*)/__shared__/g

# extern __shared__ float4 tile[];   ->   EMU_DYNAMIC(tile, float4);
s/extern\s\+__shared__\s\+\(\w[^][;<,]*\)\s\+\(\w\+\)\[\];/EMU_DYNAMIC(\2, \1);/g

# __shared__ float tile[32][33];   ->   EMU_SHARED(tile, float[32][33]);
s/__shared__\s\+\(\w[^][;<]*\(<[^<>]*>\)\?\)\s\+\(\w\+\)\(\(\[[^];]*\]\)*\);/EMU_SHARED(\3, \1\4);/g

# kernel<TILE><<<grid, block>>>(x, n)
# ->   EMU_LAUNCH((kernel<TILE>), grid, block)(x, n)
s/\([A-Za-z_][A-Za-z0-9_:]*\(<[^<>;(){}]*>\)\?\)\s*<<</EMU_LAUNCH((\1), /g
s/>>>\s*(/)(/g
