# sed -f tests/cuda_on_cpu.sed KERNELS.cu: what a C++ compiler cannot read in a CUDA file, rewritten
# for tests/cuda_on_cpu.h. Everything stays on its line, so that messages name the lines of the file:
#   { echo '#line 1 "KERNELS.cu"'; sed -f tests/cuda_on_cpu.sed KERNELS.cu; } | g++ -x c++ ... -

# The whole file at once: a declaration or a launch may be broken over several lines.
:read
$!{
N
b read
}

# CUDA's headers; tests/cuda_on_cpu.h stands for all of them.
s|#include[ \t]*<cuda[^>\n]*>|// &|g
s|#include[ \t]*<mma\.h>|// &|g

# Advice to a GPU compiler.
s|#pragma[ \t]\+unroll|// &|g

# extern __shared__ float4 tile[];  ->  float4 *tile = emulator::dynamic_shared<float4>();
s/extern\([ \t\n]\+\)__shared__[ \t\n]\+\(\(__align__\|alignas\)([^()]*)[ \t\n]*\)\?\([A-Za-z_][A-Za-z0-9_: ]*[A-Za-z0-9_]\)[ \t\n]\+\([A-Za-z_][A-Za-z0-9_]*\)\[\];/\4 *\5 =\1emulator::dynamic_shared<\4>();/g

# __shared__ float tile[32][33];  ->  auto &tile = emulator::shared_array<float[32][33]>([] {});
# The lambda's type tells one declaration from every other.
s/__shared__[ \t\n]\+\(\(__align__\|alignas\)([^()]*)[ \t\n]*\)\?\([A-Za-z_][A-Za-z0-9_: ]*\(<[^<>;]*>\)\?\)[ \t\n]\+\([A-Za-z_][A-Za-z0-9_]*\)\(\(\[[^];]*\]\)*\);/auto \&\5 = emulator::shared_array<\3\6>([] {});/g

# kernel<TILE><<<grid, block>>>(x, n)  ->  emulator::launch("kernel<TILE>", kernel<TILE>, grid, block)(x, n)
s/\([A-Za-z_][A-Za-z0-9_:]*\(<[^<>;(){}]*>\)\?\)[ \t\n]*<<</emulator::launch(R"(\1)", \1, /g
s/>>>[ \t\n]*(/)(/g
