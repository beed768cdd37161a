/* see_kernels.cu - kernels of one block whose requests, sectors and conflicts are known by hand: what
   tests/labs/test_see.sh expects of labs/tools/see.py. i is the thread, of 64, where nothing else
   is said; in and out are at multiples of 256 bytes. */

#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>

static __global__ void stride_1(float *out, const float *in) {
    const int i = threadIdx.x;
    out[i] = in[i];
}

static __global__ void stride_2(float *out, const float *in) {
    const int i = threadIdx.x;
    out[i] = in[2 * i];
}

static __global__ void stride_32(float *out, const float *in) {
    const int i = threadIdx.x;
    out[i] = in[32 * i];
}

// The 32 lanes of a warp touch 5 sectors, since they begin in the middle of one.
static __global__ void shifted(float *out, const float *in) {
    const int i = threadIdx.x;
    out[i] = in[i + 1];
}

static __global__ void broadcast(float *out, const float *in) {
    __shared__ float shared[64];
    const int i = threadIdx.x;
    shared[i] = in[0];
    __syncthreads();
    out[i] = shared[5];
}

static __global__ void fours(float4 *out, const float4 *in) {
    __shared__ float4 shared[64];
    const int i = threadIdx.x;
    shared[i] = in[i];
    __syncthreads();
    out[i] = shared[63 - i];
}

static __global__ void halves(uint16_t *out, const uint16_t *in) {
    const int i = threadIdx.x;
    out[i] = in[i];
}

// Blocks of 32 x 32 threads; a warp reads a column of the tile, which is in one bank.
static __global__ void transpose(float *out, const float *in) {
    __shared__ float tile[32][32];
    const int x = threadIdx.x, y = threadIdx.y;
    tile[y][x] = in[32 * y + x];
    __syncthreads();
    out[32 * y + x] = tile[x][y];
}

static __global__ void transpose_padded(float *out, const float *in) {
    __shared__ float tile[32][33];
    const int x = threadIdx.x, y = threadIdx.y;
    tile[y][x] = in[32 * y + x];
    __syncthreads();
    out[32 * y + x] = tile[x][y];
}

static __global__ void two_to_a_bank(float *out, const float *in) {
    __shared__ float shared[128];
    const int i = threadIdx.x;
    shared[2 * i] = in[i];
    __syncthreads();
    out[i] = shared[2 * i];
}

static __global__ void odd_lanes(float *out, const float *in) {
    const int i = threadIdx.x;
    if (i % 2)
        out[i] = in[i];
}

// Lanes of one parity read in the even steps, the others in the odd ones: 16 at a time.
static __global__ void by_turns(float *out, const float *in) {
    const int i = threadIdx.x;
    float sum = 0;
    for (int step = 0; step < 4; step++)
        if ((i + step) % 2)
            sum += in[64 * step + i];
    out[i] = sum;
}

// A lane adds up 1 to 4 numbers: 32, 24, 16 and 8 lanes are on.
static __global__ void ragged(float *out, const float *in) {
    const int i = threadIdx.x;
    float sum = 0;
    for (int step = 0; step <= i % 4; step++)
        sum += in[64 * step + i];
    out[i] = sum;
}

static __global__ void scaled_sum(float *out, const float *x, const float *y) {
    const int i = threadIdx.x;
    out[i] = 3 * x[i] + y[i];
}

static __global__ void all_add(int *out) {
    atomicAdd(&out[0], 1);
}

static __global__ void reversed(float *out, const float *in) {
    __shared__ float shared[64];
    const int i = threadIdx.x;
    shared[i] = in[i];
    __syncthreads();
    out[i] = shared[63 - i];
}

// As before, but a thread reads what another one may not have written yet.
static __global__ void reversed_too_early(float *out, const float *in) {
    __shared__ float shared[64];
    const int i = threadIdx.x;
    shared[i] = in[i];
    out[i] = shared[63 - i];
    __syncthreads();
    out[i] += 0 * shared[i];
}

// Within a warp __syncwarp() is enough.
static __global__ void reversed_in_warp(float *out, const float *in) {
    __shared__ float shared[64];
    const int i = threadIdx.x;
    shared[i] = in[i];
    __syncwarp();
    out[i] = shared[i ^ 31];
}

// Calls only what the runtime of tests/ptx has, too. With an argument also the kernel with the bug,
// which that runtime reports.
int main(int argc, char **) {
    enum { BYTES = 64 * 64 * sizeof(float) };
    float *in, *out;
    cudaStream_t stream;
    cudaSetDevice(0);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMalloc(&in, BYTES);
    cudaMalloc(&out, BYTES);
    cudaMemsetAsync(in, 0, BYTES, stream);
    cudaMemsetAsync(out, 0, BYTES, stream);
    stride_1<<<1, 64, 0, stream>>>(out, in);
    stride_2<<<1, 64, 0, stream>>>(out, in);
    stride_32<<<1, 64, 0, stream>>>(out, in);
    shifted<<<1, 64, 0, stream>>>(out, in);
    broadcast<<<1, 64, 0, stream>>>(out, in);
    fours<<<1, 64, 0, stream>>>((float4 *)out, (const float4 *)in);
    halves<<<1, 64, 0, stream>>>((uint16_t *)out, (const uint16_t *)in);
    transpose<<<1, dim3(32, 32), 0, stream>>>(out, in);
    transpose_padded<<<1, dim3(32, 32), 0, stream>>>(out, in);
    two_to_a_bank<<<1, 64, 0, stream>>>(out, in);
    odd_lanes<<<1, 64, 0, stream>>>(out, in);
    by_turns<<<1, 64, 0, stream>>>(out, in);
    ragged<<<1, 64, 0, stream>>>(out, in);
    scaled_sum<<<1, 64, 0, stream>>>(out, in, in + 64);
    all_add<<<1, 64, 0, stream>>>((int *)out);
    reversed<<<1, 64, 0, stream>>>(out, in);
    if (argc > 1)
        reversed_too_early<<<1, 64, 0, stream>>>(out, in);
    reversed_in_warp<<<1, 64, 0, stream>>>(out, in);
    const cudaError_t error = cudaStreamSynchronize(stream);
    printf("%s\n", cudaGetErrorString(error));
    return error != cudaSuccess;
}
