/* cuda_on_hip.h - the kernels on AMD's GPUs: `make HIP=1` writes hip for cuda at the beginning of
   each name in cnn_kernels.cu, and hipcc compiles that with this file in front, which has what HIP
   names or does otherwise. A wave has 64 threads on many of these GPUs, two warps: so shuffles name
   their width, 32, and nothing may rely on the threads of a warp executing in step. Tensor cores
   are not used. */
#include <algorithm>
#include <hip/hip_runtime.h>
#include <stdio.h>
#define hipDeviceProp hipDeviceProp_t
#define hipFreeHost hipHostFree
#define hipMallocHost hipHostMalloc
#define hipFuncSetAttribute(kernel, ...) hipFuncSetAttribute((const void *)(kernel), __VA_ARGS__)
#define hipGraphInstantiateWithFlags(to, graph, flags) hipGraphInstantiate(to, graph, NULL, NULL, 0)
#define hipPointerAttributes hipPointerAttribute_t
#if HIP_VERSION_MAJOR < 6
#define MEMORY_TYPE memoryType
#else
#define MEMORY_TYPE type
#endif
#define __shfl_down_sync(mask, value, distance) __shfl_down(value, distance, 32)
#define __shfl_xor_sync(mask, value, lanes) __shfl_xor(value, lanes, 32)
#undef __launch_bounds__ // HIP's has waves of 64 threads for each of the 4 SIMD units, not blocks
#define __launch_bounds__(threads, blocks)                  \
    __attribute__((amdgpu_flat_work_group_size(1, threads), \
                   amdgpu_waves_per_eu(((threads) * (blocks) + 255) / 256)))
#define SM_OF(properties) 0
#define PLATFORM "HIP"
#define REBUILD "make HIP=1 HIP_ARCH=gfx90a, or what rocminfo shows"
using std::max; // those of HIP's headers for the host take int
using std::min;

// Its tools have calls of their own.
#define hipProfilerStart() hipSuccess
#define hipProfilerStop() hipSuccess
#define nvtxRangePushA(name) (void)(name)
#define nvtxRangePop()

// All precisions fall back to the tiled kernels, with 32 bits.
#define CONV2D_OF(T, KERNELS) real, conv2d_forward<real, Tiled>, conv2d_backward<real, Tiled>

// An architecture such as gfx90a; the address on the PCI bus, as there is no uuid.
template <class Device>
static void describe_amd(Device *d, const hipDeviceProp_t &p, int driver, size_t total) {
    snprintf(d->name, sizeof d->name, "%.150s, %.40s, %d compute units, %.1f GB", p.name,
             p.gcnArchName, p.multiProcessorCount, (double)total / 1e9);
    snprintf(d->driver, sizeof d->driver, "HIP %d", driver);
    snprintf(d->uuid, sizeof d->uuid, "GPU-%04x-%02x-%02x", p.pciDomainID, p.pciBusID,
             p.pciDeviceID);
}
