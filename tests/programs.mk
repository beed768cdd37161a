# Included by the Makefile: the programs that only the tests and make ptx use.

build/test_settings: SETTINGS = $(TEST_FLAGS)
build/ptx_settings: SETTINGS = $(PTX_BUILD)

# In make test, compiling takes longer than running: -O1.
TEST_FLAGS = $(BUILD) -Wno-unused-function $(if $(SANITIZED),$(SANITIZE),$(if $(QUICK),-O1))
build/test_float build/test_double: build/test_%: $(wildcard tests/unit/*) tests/check.h $(SOURCE) build/test_settings
	$(TEST_FLAGS) -DREAL=$* tests/unit/unit.c -o $@ $(LIBS) -ldl
build/test_avx2: $(wildcard tests/unit/*) tests/check.h $(SOURCE) build/test_settings
	$(TEST_FLAGS) -march=x86-64-v3 -mtune=znver3 -DSUITE='"avx2"' tests/unit/unit.c -o $@ $(LIBS) -ldl

build/parity_float build/parity_double: build/parity_%: tests/pytorch/parity.c $(SOURCE) build/test_settings
	$(TEST_FLAGS) -DREAL=$* tests/pytorch/parity.c -o $@ $(LIBS)

# For the tests that refuse memory and make calls fail: the libraries of CUDA, MPI and NCCL end a program where that happens.
build/cnn-cpu: $(SOURCE) build/settings build/test_settings
	$(BUILD) $(if $(QUICK),-O1) $(DEFINES) cnn.c -o $@ $(LIBS)

# The tests and timings of the GPU code: on a GPU, and with the prefix emu_ in the emulator.
GPU_PROGRAMS = test_cuda bench_gpu
$(GPU_PROGRAMS:%=build/%.o): build/%.o: tests/gpu/%.c tests/check.h $(SOURCE) build/settings build/test_settings
	$(BUILD) $(DEFINES) -Wno-unused-function $< $(if $(QUICK),-O1) -c -o $@
$(addprefix build/,$(GPU_PROGRAMS)): build/%: build/%.o $(KERNELS) build/link_settings
	$(LINK) $(CUDA_LIBS) $(LIBS)
$(addprefix build/emu_,$(GPU_PROGRAMS)): build/emu_%: build/%.o build/emu_kernels.o
	$(LINK) -lstdc++ $(LIBS)
# The layouts of the tensor cores: kernels of the test after sections 1 to 7 of cnn_kernels.cu, as one file. Section 8
# would instantiate all of the kernels, which takes most of the compiler's time.
build/test_tensor.cu: cnn_kernels.cu tests/gpu/test_tensor.cu
	@mkdir -p build
	{ echo '#line 1 "cnn_kernels.cu"'; sed '/^\/\* ==== 8\. /,$$d' cnn_kernels.cu; cat tests/gpu/test_tensor.cu; } > $@
TENSOR_BUILD = $(NVCC_BUILD) -I. -diag-suppress 177 $< # 177: functions for section 8 are not called
build/test_tensor: build/test_tensor.cu build/declarations build/kernel_settings build/link_settings
	$(TENSOR_BUILD) -arch=$(CUDA_ARCH) -o $@ $(if $(HAVE_NCCL),-lnccl)
build/emu_test_tensor: build/test_tensor.cu $(EMULATOR) build/declarations build/emu_settings build/test_settings
	sed -f tests/emulator/cuda_on_cpu.sed $< | $(EMU_BUILD) -O$(if $(QUICK),0,1) -x c++ - -o $@ $(LIBS)

# Kernels whose requests are known by hand, for tests/labs/test_see.sh
build/emu_see_kernels: tests/labs/see_kernels.cu $(EMULATOR) build/emu_settings
	$(COUNT_KERNELS)

# What nvcc compiled, executed on the CPU: tests/ptx/ptx.h. PTX_SM='75 80 90': the architectures that nvcc compiles for.
PTX_SM = 80
PTX_OBJECTS = $(patsubst tests/ptx/%.cpp,build/ptx/%.o,$(wildcard tests/ptx/*.cpp))
PTX_BUILD = $(CXX) -std=c++20 -O2 -march=$(ARCH) -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-strict-aliasing \
	-fopenmp -Wall -Wextra -I$(dir $(NVCC))../include
# Beside sm_80, make test-all runs one of these each day, as tests/ptx/test_ptx.sh and tests/gpu/test_nvcc.sh choose it.
DAY = $(or $(ROTATION),$(shell date +%j))
PTX_TODAY = 80 $(if $(LONG),75 90,$(filter 75 90,$(word $(shell expr $(DAY) % 3 + 1),75 newest 90)))
# A register is 32 numbers of 4 bytes, so it needs a CPU with AVX2 and F16C.
HAVE_PTX = $(and $(HAVE_CUDA),$(call probe,$(HASH)ifndef __F16C__\n$(HASH)error\n$(HASH)endif\nint main(void) { \
	return 0; },-march=$(ARCH)))
ptx_programs = $(foreach sm,$(1),$(addprefix build/ptx/sm_$(sm)/,cnn $(GPU_PROGRAMS))) build/ptx/test_tensor
$(PTX_OBJECTS): build/ptx/%.o: tests/ptx/%.cpp tests/ptx/ptx.h build/ptx_settings
	@mkdir -p $(@D)
	$(PTX_BUILD) -c $< -o $@
# The tests of mma and ldmatrix need no machine code.
build/ptx_tensor.o: build/test_tensor.cu build/declarations build/kernel_settings
	@mkdir -p $(@D)
	$(TENSOR_BUILD) -gencode arch=compute_80,code=compute_80 --no-compress -c -o $@
build/ptx/test_tensor: build/ptx_tensor.o
build/ptx_see.o: tests/labs/see_kernels.cu build/kernel_settings
	$(NVCC_BUILD) -gencode arch=compute_80,code=compute_80 --no-compress -c $< -o $@
build/ptx/see_kernels: build/ptx_see.o
build/ptx/sm_%/cnn: build/cnn.o build/cnn_kernels_sm_%.o $(PTX_OBJECTS)
	$(LINK_PTX)
build/ptx/sm_%/test_cuda: build/test_cuda.o build/cnn_kernels_sm_%.o $(PTX_OBJECTS)
	$(LINK_PTX)
build/ptx/sm_%/bench_gpu: build/bench_gpu.o build/cnn_kernels_sm_%.o $(PTX_OBJECTS)
	$(LINK_PTX)
build/ptx/test_tensor build/ptx/see_kernels: $(PTX_OBJECTS)
	$(LINK_PTX)
LINK_PTX = @mkdir -p $(@D) && $(STEP) -fopenmp $(filter %.o,$^) -o $@ $(MPI) -lstdc++ -ldl $(if $(HAVE_NCCL),-lnccl) $(LIBS)
.PRECIOUS: build/cnn_kernels_%.o
ptx: $(if $(HAVE_PTX),$(call ptx_programs,$(PTX_SM)))
	@echo "$(if $(HAVE_PTX),In build/ptx: programs that execute what nvcc compiled on the CPU; tests/ptx/test_ptx.sh \
		runs them,make ptx needs $(if $(HAVE_CUDA),a CPU with AVX2,nvcc$(comma) which was not found): skipped)"

# EMULATE=1: tiny networks in the emulator, without speeds.
ifneq ($(or $(KERNELS),$(VIRTUAL)),)
bench-gpu: $(if $(VIRTUAL),cnn-emu build/emu_bench_gpu,cnn build/bench_gpu)
	@EMULATE=$(VIRTUAL) tests/gpu/bench_gpu.sh
else
bench-gpu:
	@echo "make bench-gpu needs nvcc and a GPU; nvcc was not found: run make doctor"; exit 1
endif

# All that the parts of the tests use is built first: they run side by side, and two makes would collide.
HAVE_TORCH = $(shell tests/python_with.sh torch)
# Whether parts of this folder are wanted: without PARTS, all are.
parts_of = $(or $(filter $(1)/%,$(PARTS)),$(if $(PARTS),,all))
# The same of a folder whose parts make test leaves to make test-all
all_parts_of = $(if $(PARTS),$(filter $(1)/%,$(PARTS)),$(if $(QUICK),,all))
TEST_PROGRAMS = $(TESTED) $(if $(call parts_of,unit),build/test_float build/test_double) \
	$(if $(filter all unit/avx2,$(call all_parts_of,unit)),$(if $(filter x86_64,$(shell uname -m)),build/test_avx2)) \
	$(if $(shell command -v $(CXX) 2>/dev/null),cnn-emu \
		$(if $(call parts_of,gpu),$(addprefix build/emu_,$(GPU_PROGRAMS) test_tensor))) \
	$(if $(and $(call all_parts_of,ptx),$(HAVE_PTX)),$(call ptx_programs,$(if $(QUICK),80,$(PTX_TODAY)))) \
	$(if $(call parts_of,robust),build/cnn-cpu) \
	$(if $(call parts_of,labs),$(if $(shell command -v $(CXX) 2>/dev/null),build/emu_see_kernels) \
		$(if $(QUICK),,$(if $(HAVE_PTX),build/ptx/see_kernels))) \
	$(if $(and $(call all_parts_of,pytorch),$(HAVE_TORCH)),build/parity_float build/parity_double) \
	$(if $(QUICK),,build/bench) # quick: not needed
.PHONY: test-programs
test-programs:
	@$(MAKE) --no-print-directory -j $(shell nproc) $(TEST_PROGRAMS)
