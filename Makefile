# cnn.c: `make run` trains, `make test` tests, `make help` lists all targets and variables.
#
# Variables: CC=clang   ARCH=native|x86-64-v3|...   NO_OMP=1   NO_CUDA=1   NO_MPI=1
#            OPT=-O0 (no optimization)   NO_NCCL=1
#            CUDA_ARCH=native|sm_90|...  (all-major: every GPU that this nvcc supports, and later ones)
#            HIP=1 (for AMD's GPUs, instead of CUDA)   HIP_ARCH='gfx90a gfx1030'   HIPCC=PATH

CC     = gcc
ARCH   = native
CUDA   ?= /usr/local/cuda
# The GPUs of this machine; login nodes have none.
GPUS_HERE := $(shell nvidia-smi -L 2>/dev/null | sed -n 's/^GPU [0-9]*: //p' | sed 's/ .UUID.*//')
# make test, which sets QUICK: one architecture, since all of them take minutes
CUDA_ARCH := $(if $(QUICK),$(if $(GPUS_HERE),native,sm_80),all-major)
HIPCC  = hipcc
HIP_ARCH = gfx90a

# -fno-math-errno: sqrt() is one instruction. No option here changes floating-point semantics.
OPT    = -O3
CFLAGS = -std=gnu17 $(OPT) -march=$(ARCH) -fno-math-errno -g -Wall -Wextra
LIBS   = -lm -lpthread
-include labs/starter.mk # exists only in the starter of a lab
# A notebook that was saved with its outputs changes no program.
COMMIT := $(shell git describe --always 2>/dev/null || echo unknown)$(shell git diff --quiet HEAD -- :/ ':!*.ipynb' \
	2>/dev/null; [ $$? -ne 1 ] || echo -dirty)

HASH := \#
comma := ,
# An optional part is used if a test program with it compiles and links.
probe = $(shell printf '$(1)' | $(CC) -x c - -o /dev/null $(2) 2>/dev/null && echo yes)
ifndef NO_OMP
OMP := $(call probe,$(HASH)include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; },-fopenmp)
endif
OMP_FLAGS := $(if $(OMP),-fopenmp,-Wno-unknown-pragmas)
ifdef HIP
HAVE_HIP := $(shell command -v $(firstword $(HIPCC)) 2>/dev/null)
else ifndef NO_CUDA
NVCC := $(shell command -v nvcc 2>/dev/null || command -v $(CUDA)/bin/nvcc 2>/dev/null)
HAVE_CUDA := $(and $(NVCC),$(call probe,$(HASH)include <cuda_runtime_api.h>\nint main(void) { int n; \
	return cudaGetDeviceCount(&n) == 0; },-I$(dir $(NVCC))../include -L$(dir $(NVCC))../lib64 \
	-lcudart_static -lpthread -ldl -lrt))
endif
ifndef NO_MPI
MPI_FLAGS := $(wordlist 2,99,$(shell mpicc -show 2>/dev/null)) # that mpicc would add
HAVE_MPI := $(if $(MPI_FLAGS),$(call probe,$(HASH)include <mpi.h>\nint main(void) { return MPI_Init(0$(comma) 0); },\
	$(MPI_FLAGS)))
endif
MPI := $(if $(HAVE_MPI),-DCNN_MPI $(MPI_FLAGS))
ifndef NO_NCCL
HAVE_NCCL := $(and $(HAVE_CUDA),$(HAVE_MPI),$(call probe,$(HASH)include <nccl.h>\nint main(void) { int v; \
	return ncclGetVersion(&v); },-I$(CUDA)/include -L$(CUDA)/lib64 -lnccl))
endif

.PHONY: all help run test test-all test-long data bench bench-gpu debug emulate count ptx races overlap clean found doctor \
	cpu single multi study study-scaling study-workers ablation plots report verify starter check crossover \
	convolution matmul see
all: found cnn

CUDA_FOR = for $(CUDA_ARCH)
found:
	@echo "OpenMP: $(if $(OMP),found,$(if $(NO_OMP),disabled,not found: --kernels naive uses one thread))"
ifdef HIP
	@echo "HIP:    $(if $(HAVE_HIP),found$(comma) for AMD's $(HIP_ARCH),hipcc not found: CPU only)"
else
	@echo "CUDA:   $(if $(HAVE_CUDA),found$(comma) $(CUDA_FOR),$(if $(NO_CUDA),disabled,not found: CPU only))"
endif
	@echo "MPI:    $(if $(HAVE_MPI),found,$(if $(NO_MPI),disabled,not found: one machine only))"
	@echo "NCCL:   $(if $(HAVE_NCCL),found,$(if $(NO_NCCL),disabled,not found$(comma) or not needed: it connects GPUs of MPI ranks))"

help:
	@echo "Building"
	@echo "  make           build ./cnn, for every GPU if nvcc is found, and show which optional parts were found"
	@echo "  make doctor    show what this machine provides, and how to get what is missing"
	@echo "  make emulate   build ./cnn-emu: the GPU code on the CPU, to develop and check kernels"
	@echo "  make count     build ./cnn-count: the same, counting what each kernel reads and writes"
	@echo "  make see KERNEL=NAME  a page that shows what a block of this kernel reads and writes; LAB=5: of lab 5's"
	@echo "                 BLOCK=0, LAUNCH=0, WITH=PAGE.html: beside an earlier page, OPTIONS='--kernels naive'"
	@echo "  make ptx       build build/ptx/sm_80/cnn: what nvcc compiled, executed on the CPU, to check kernels without a GPU"
	@echo "  make debug     build ./cnn-debug with the address and undefined-behaviour sanitizers"
	@echo "  make clean     remove everything that make built; runs/ is kept"
	@echo "  make HIP=1     build ./cnn with the GPU code for AMD's GPUs, by hipcc; HIP_ARCH=gfx90a"
	@echo "Running"
	@echo "  make data      download MNIST (INSTALL=1: may install Debian's Fashion-MNIST package)"
	@echo "  make run       build build/cnn-here, which is ./cnn with what this machine can use, and train the MNIST network"
	@echo "                 for one epoch on the best data found"
	@echo "  make test      run the tests, five to ten minutes on two cores; SANITIZED=1: with sanitizers"
	@echo "  make test-all  run all tests, with every shape, model and lab: half an hour and more"
	@echo "  make test-long  what takes longer still: fuzzing, faults, signals, mutations, compilers; MINUTES=60"
	@echo "  make races     check the GPU kernels for data races, in the emulator (a minute)"
	@echo "  make bench     training speed, per cent of this machine's peak, compared with PyTorch"
	@echo "  make bench-gpu the same on the GPU, in each precision, compared with PyTorch and with the device's limits"
	@echo "Timing study"
	@echo "  make cpu       one run on the CPU; make single, make multi: on one GPU, on two"
	@echo "  make study     devices x BATCHES x REPEATS: study.csv and plots; continues where it was stopped"
	@echo "  make study-scaling   1, 2, 4, ... devices: scaling.csv and a plot"
	@echo "  make study-workers   WORKERS='1 2 4 8' threads that load images: workers.csv and a plot"
	@echo "  make ablation  each optimization for the GPU on top of those before: speed and accuracy in ablation.csv;"
	@echo "                 RUNGS=slurm/configs/one-core.txt (after make build/cnn-O0), large-batch.txt: other ladders"
	@echo "  make plots RUNS=DIR  plots of the run folders in DIR"
	@echo "  make report RUNS=DIR report.md and report.html: tables and plots of the run folders, questions for you"
	@echo "  make verify RUNS=DIR what is missing or implausible there; run it before you hand it in"
	@echo "  MODEL=cifar EPOCHS=20 BATCH=250 BATCHES='50 100' REPEATS=10 LIMIT=images GPUS=2 RUNS=DIR"
	@echo "  OPTIONS='--width 64': more options of ./cnn; EMULATE=1: virtual GPUs where there are none"
	@echo "Labs (labs/README.md lists them)"
	@echo "  make starter LAB=1 OUT=DIR  write the starter of a lab to DIR"
	@echo "  make check LAB=1     in a starter: run the lab's tests, write results.json; TEST=2: only one"
	@echo "  make report LAB=1    that lab's runs, plots and questions, in reports/; make verify LAB=1 checks them"
	@echo "  make gradescope LAB=1       for teachers: the zip to upload as that lab's autograder"
	@echo "  make crossover       lab 4: a layer on the CPU and on the GPU, 1 to 256 images; EMULATE=1 LARGEST=16"
	@echo "  make convolution     lab 5: a convolution, one change at a time; EMULATE=1: counts what kernels read"
	@echo "  make overlap         lab 6: how much of the loader's work the device hides, in TRACE=runs/lab06/trace.json"
	@echo "  make matmul          lab 10: a matrix product on tensor cores; EMULATE=1: counts what kernels do"
	@echo "Variables: CC=clang ARCH=x86-64-v3 OPT=-O0 NO_OMP=1 NO_CUDA=1 NO_MPI=1 NO_NCCL=1 CUDA_ARCH=native"

doctor:
	@CC='$(CC)' OMP='$(OMP)' NVCC='$(NVCC)' HAVE_CUDA='$(HAVE_CUDA)' HAVE_MPI='$(HAVE_MPI)' \
		HAVE_NCCL='$(HAVE_NCCL)' slurm/doctor.sh

SOURCE = cnn.c $(wildcard cnn_kernels.c) # cnn.c includes the second one if it exists

# Rebuilds when the settings change, not only when the source does. Each CUDA_ARCH has an object of its own.
BUILD = $(CC) $(CFLAGS) $(OMP_FLAGS)
NVCC_BUILD = $(NVCC) -std=c++17 -O3 --threads 0 -lineinfo $(if $(HAVE_NCCL),-DCNN_NCCL)
HIP_BUILD = $(HIPCC) -x hip -I. -include tests/emulator/cuda_on_hip.h -std=c++17 -O3 $(addprefix --offload-arch=,$(HIP_ARCH))
KERNEL_BUILD = $(if $(HAVE_HIP),$(HIP_BUILD),$(NVCC_BUILD))
build/settings build/link_settings build/here_settings build/kernel_settings build/emu_settings build/test_settings \
		build/ptx_settings: FORCE
	@mkdir -p build
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@
build/settings: SETTINGS = $(BUILD) $(MPI) $(COMMIT)
build/link_settings: SETTINGS = $(KERNELS) $(CUDA_LIBS)
build/here_settings: SETTINGS = $(HERE_KERNELS) $(GPUS_HERE)
build/kernel_settings: SETTINGS = $(KERNEL_BUILD)
build/emu_settings: SETTINGS = $(EMU_BUILD)
build/test_settings: SETTINGS = $(TEST_FLAGS)
.PHONY: FORCE
FORCE:

DEFINES = -DCNN_COMMIT='"$(COMMIT)"' -DCNN_FLAGS='"$(CFLAGS) $(OMP_FLAGS)"'
# cnn_kernels.cu includes only the declarations of cnn.c: other changes of cnn.c do not recompile it.
build/declarations: cnn.c FORCE
	@mkdir -p build
	@sed '/^#ifndef CNN_DECLARATIONS_ONLY/,/^#endif .*CNN_DECLARATIONS_ONLY/d' cnn.c >$@.new
	@cmp -s $@.new $@ || cp $@.new $@

# cudart is linked statically, so that the program also starts on a machine without a driver.
ifneq ($(HAVE_CUDA),)
KERNELS = build/cnn_kernels_$(CUDA_ARCH).o
HERE_KERNELS = $(if $(GPUS_HERE),build/cnn_kernels_native.o)
CUDA_LIBS = -L$(dir $(NVCC))../lib64 -lcudart_static -lstdc++ -ldl -lrt \
	$(if $(HAVE_NCCL),-lnccl)
endif
ifneq ($(HAVE_HIP),)
KERNELS = build/cnn_kernels.o
HERE_KERNELS = $(KERNELS)
HIP_LIB = $(abspath $(dir $(realpath $(HAVE_HIP)))../lib)
CUDA_LIBS = -L$(HIP_LIB) -Wl,-rpath,$(HIP_LIB) -lamdhip64 -lstdc++
endif
# nvcc before 11.5 does not know all-major, before 11.6 native: it compiles for this machine's GPU, or for sm_80, and
# for later ones.
GPU_SM = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
	sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/sm_\1\2/p' | head -n 1)
known_arch = $(or $(if $(filter all-major native,$(1)),$(shell for arch in $(1) $(GPU_SM) sm_80; do \
	$(NVCC) --help | grep -q "'$$arch'" && echo $$arch && break; done)),$(1))
build/cnn_kernels_%.o: cnn_kernels.cu build/declarations build/kernel_settings
	@echo "nvcc compiles the kernels for these GPUs, side by side:" \
		`$(NVCC_BUILD) -arch=$(call known_arch,$*) -c $< -o $@ --dryrun 2>&1 | grep -o 'ptxas.*arch=sm_[0-9]*' | grep -o 'sm_[0-9]*$$' | sort -uV`
	@echo "The six of nvcc 13.0's all-major took two minutes on 2 cores of an AMD EPYC (Zen 3). Faster: make CUDA_ARCH=sm_90," \
		"for one of them, make NO_CUDA=1, for none."
	$(NVCC_BUILD) -arch=$(call known_arch,$*) -c $< -o $@ $(if $(filter sm_%,$*),--no-compress $(NVCC_REPORT))
build/cnn_kernels_native.o: build/here_settings
# Of one architecture the object has PTX as text, for tests/ptx, and there is what the compilers say of each kernel, for
# tests/gpu/test_nvcc.sh.
NVCC_REPORT = -Xptxas -v -Xcompiler -Wall$(comma)-Wextra >$@.log 2>&1 || { cat $@.log; exit 1; }
build/cnn_kernels.o: build/cnn_kernels.hip tests/emulator/cuda_on_hip.h build/declarations build/kernel_settings
	$(HIP_BUILD) -c $< -o $@
# HIP has CUDA's functions under names that begin with hip; tests/emulator/cuda_on_hip.h has what else differs.
build/cnn_kernels.hip: cnn_kernels.cu FORCE
	@mkdir -p build
	@{ echo '#line 1 "cnn_kernels.cu"'; sed 's/\bcuda\([A-Z]\)/hip\1/g' $<; } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# cnn.c is the same in all programs; they differ in the kernels that are linked to it. Compiling and linking get the
# same options; clang would complain of those that only the other step needs.
STEP = $(BUILD) -Wno-unused-command-line-argument
build/cnn.o: $(SOURCE) build/settings
	$(STEP) $(DEFINES) $(MPI) -c cnn.c -o $@
LINK = $(STEP) $(filter %.o,$^) -o $@ $(MPI)
# build/cnn-quick is what make test tests: with the kernels for one architecture, which ./cnn has for all.
cnn build/cnn-quick: build/cnn.o $(KERNELS) build/link_settings
	$(LINK) $(CUDA_LIBS) $(LIBS)
# What this machine can use, for make run: ./cnn stays the program for every GPU, which jobs on other machines start.
build/cnn-here: build/cnn.o $(HERE_KERNELS) build/here_settings
	$(LINK) $(if $(HERE_KERNELS),$(CUDA_LIBS)) $(LIBS)

# Without optimization, for slurm/configs/one-core.txt
build/cnn-O0: $(SOURCE) build/settings
	$(subst $(OPT),-O0,$(BUILD) $(DEFINES)) cnn.c -o $@ $(LIBS)

# The same sources on the CPU: tests/emulator/cuda_on_cpu.h emulates the GPU. Two steps: g++ compiles the kernels,
# gcc the rest.
CXX = g++
EMU_OPT = -O2
EMU_BUILD = $(CXX) -std=c++17 $(EMU_OPT) -march=$(ARCH) -g -I. -include tests/emulator/cuda_on_cpu.h \
	-fsanitize=alignment -fsanitize-undefined-trap-on-error
EMU_SOURCE = { echo '\#line 1 "cnn_kernels.cu"'; sed -f tests/emulator/cuda_on_cpu.sed cnn_kernels.cu; }
build/emu_kernels.o build/count_kernels.o: cnn_kernels.cu $(wildcard tests/emulator/cuda_on_cpu*) \
		build/declarations build/emu_settings
	$(EMU_SOURCE) | $(EMU_BUILD) $(COUNT) -x c++ -c - -o $@
# The hooks of the race detector are called for each load and store; this build counts them, and can record those of a
# block (make see). g++ 12 and newer also tell where a piece of code without a branch begins.
COUNTING = -O1 -fsanitize=thread -DCUEMU_COUNT -fno-omit-frame-pointer $(shell printf '$(HASH)if __GNUC__ < 12\n$(HASH)error \
	\n$(HASH)endif' | $(CXX) -fsanitize-coverage=trace-pc -x c++ -fsyntax-only - 2>/dev/null && \
	echo -fsanitize-coverage=trace-pc)
build/count_kernels.o: COUNT = $(COUNTING)
cnn-emu: build/emu_kernels.o
cnn-count: build/count_kernels.o
cnn-emu cnn-count: build/cnn.o
	$(LINK) -lstdc++ $(LIBS)
count: cnn-count
emulate: cnn-emu

SANITIZE = -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
cnn-debug: $(SOURCE) build/settings
	$(BUILD) $(SANITIZE) $(DEFINES) cnn.c -o $@ $(LIBS)
debug: cnn-debug

run: CUDA_FOR = $(if $(GPUS_HERE),for this machine only,but there is no GPU here: left out; make alone adds it)
run: found build/cnn-here
	build/cnn-here --epochs 1

# The timing study. `labs/tools/study.py --help` explains what is measured, `plot.py --help` what is drawn.
MODEL   = cifar
EPOCHS  = 20
BATCH   = 250
BATCHES = 50 100 150 200 250
REPEATS = 10
WORKERS = 1 2 4 8
GPUS    = 2
NAME    = $(MODEL)-$(EPOCHS)-epochs$(if $(LIMIT),-$(LIMIT)-images)
RUNS    = runs/$(NAME)
VIRTUAL = $(filter-out 0,$(EMULATE))
STUDY   = --model $(MODEL) --epochs $(EPOCHS) --gpus $(GPUS) $(if $(LIMIT),--limit $(LIMIT)) \
	$(if $(VIRTUAL),--emulate) $(if $(OPTIONS),-- $(OPTIONS))
# The first Python that has the package $(1). MPLBACKEND: matplotlib refuses that of a terminal in Jupyter.
PYTHON_WITH = $(or $(shell for python in .venv/bin/python python3 /usr/bin/python3; do \
	MPLBACKEND=Agg $$python -c 'import $(1)' 2>/dev/null && echo $$python && break; done),python3)
PLOT = $(call PYTHON_WITH,matplotlib) labs/tools/plot.py

cpu single multi: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py train $@ runs --batches $(BATCH) $(STUDY)
study: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py run '$(RUNS)' --batches $(BATCHES) --repeats $(REPEATS) $(STUDY)
	-@$(PLOT) '$(RUNS)'
study-scaling: RUNS = runs/scaling-$(NAME)
study-scaling: BATCH = 256
study-scaling: REPEATS = 5
study-scaling: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py scaling '$(RUNS)' --batches $(BATCH) --repeats $(REPEATS) $(STUDY)
	-@$(PLOT) '$(RUNS)'
study-workers: RUNS = runs/workers-$(NAME)
study-workers: EPOCHS = 1
study-workers: REPEATS = 5
study-workers: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py workers '$(RUNS)' --workers $(WORKERS) --batches $(BATCH) --repeats $(REPEATS) $(STUDY)
	-@$(PLOT) '$(RUNS)'
# Without MODEL=, the tool chooses one for the device that it finds.
ablation: MODEL =
ablation: EPOCHS = 3
ablation: BATCH = 128
ablation: REPEATS = 3
ablation: RUNS = runs/ablation-$(NAME:-%=%)$(if $(VIRTUAL),-emulated)
ablation: RUNGS = slurm/configs/ablation.txt
ablation: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py ablation '$(RUNS)' --rungs '$(RUNGS)' --batches $(BATCH) --repeats $(REPEATS) --epochs $(EPOCHS) \
		$(if $(MODEL),--model $(MODEL)) $(if $(LIMIT),--limit $(LIMIT)) $(if $(VIRTUAL),--emulate) \
		$(if $(OPTIONS),-- $(OPTIONS))
	-@$(PLOT) '$(RUNS)'
plots:
	@$(PLOT) '$(RUNS)'
# LAB=n: of that lab's runs, in reports/
report verify: RUNS := $(if $(LAB),reports/lab$(if $(filter-out 10,$(LAB)),0)$(LAB),$(RUNS))
report:
	@$(if $(LAB),labs/tools/lab_runs.sh '$(LAB)')
	-@$(PLOT) '$(RUNS)'
	@$(call PYTHON_WITH,markdown_it) labs/tools/report.py '$(RUNS)'
verify:
	@$(if $(LAB),labs/tools/lab_runs.sh '$(LAB)')
	@labs/tools/verify.py '$(RUNS)'

# The labs. FROM is the folder to check: the starter itself by default; instructors give a student's.
starter:
	@labs/check/starter.sh '$(LAB)' '$(OUT)'
check:
	@CC='$(CC)' FROM='$(FROM)' labs/check/check.sh '$(LAB)' $(TEST)
.PHONY: gradescope
gradescope:
	@labs/gradescope/pack.sh '$(LAB)' $(if $(OUT),'$(OUT)')

data:
	INSTALL=$(INSTALL) data/get_data.sh mnist

# In make test, compiling takes longer than running: -O1.
TEST_FLAGS = $(BUILD) -Wno-unused-function $(if $(SANITIZED),$(SANITIZE),$(if $(QUICK),-O1))
build/test_float build/test_double: build/test_%: $(wildcard tests/unit/*) tests/check.h $(SOURCE) build/test_settings
	$(TEST_FLAGS) -DREAL=$* tests/unit/unit.c -o $@ $(LIBS) -ldl

build/parity_float build/parity_double: build/parity_%: tests/pytorch/parity.c $(SOURCE) build/test_settings
	$(TEST_FLAGS) -DREAL=$* tests/pytorch/parity.c -o $@ $(LIBS)

# For the tests that refuse memory and make calls fail: the libraries of CUDA, MPI and NCCL end a program where that happens.
build/cnn-cpu: $(SOURCE) build/settings build/test_settings
	$(BUILD) $(if $(QUICK),-O1) $(DEFINES) cnn.c -o $@ $(LIBS)

build/bench: tests/bench/bench.c $(SOURCE) build/settings
	$(BUILD) -Wno-unused-function tests/bench/bench.c -o $@ $(LIBS)
# For any x86 CPU of the last ten years, so that valgrind can run it and counts are comparable between machines.
build/bench-v3: tests/bench/bench.c $(SOURCE) build/settings
	$(BUILD) -march=x86-64-v3 -Wno-unused-function tests/bench/bench.c -o $@ $(LIBS)
bench: cnn build/bench
	@tests/bench/bench.sh

# The tests and timings of the GPU code: on a GPU, and with the prefix emu_ in the emulator.
GPU_PROGRAMS = test_cuda bench_gpu
GPU_TEST = $(BUILD) $(DEFINES) -Wno-unused-function $<
$(GPU_PROGRAMS:%=build/%.o): build/%.o: tests/gpu/%.c tests/check.h $(SOURCE) build/settings build/test_settings
	$(GPU_TEST) $(if $(QUICK),-O1) -c -o $@
$(addprefix build/,$(GPU_PROGRAMS)): build/%: build/%.o $(KERNELS) build/link_settings
	$(LINK) $(CUDA_LIBS) $(LIBS)
$(addprefix build/emu_,$(GPU_PROGRAMS)): build/emu_%: build/%.o build/emu_kernels.o
	$(LINK) -lstdc++ $(LIBS)
# The layouts of the tensor cores: kernels of the test behind sections 1 to 7 of cnn_kernels.cu, as one file. Section 8
# would instantiate all of the kernels, which takes most of the compiler's time.
build/test_tensor.cu: cnn_kernels.cu tests/gpu/test_tensor.cu
	@mkdir -p build
	{ echo '#line 1 "cnn_kernels.cu"'; sed '/^\/\* ==== 8\. /,$$d' cnn_kernels.cu; cat tests/gpu/test_tensor.cu; } > $@
TENSOR_BUILD = $(NVCC_BUILD) -I. -diag-suppress 177 $< # 177: functions for section 8 are not called
build/test_tensor: build/test_tensor.cu build/declarations build/kernel_settings build/link_settings
	$(TENSOR_BUILD) -arch=$(CUDA_ARCH) -o $@ $(if $(HAVE_NCCL),-lnccl)
build/emu_test_tensor: build/test_tensor.cu $(wildcard tests/emulator/cuda_on_cpu*) build/declarations build/emu_settings build/test_settings
	sed -f tests/emulator/cuda_on_cpu.sed $< | $(EMU_BUILD) -O$(if $(QUICK),0,1) -x c++ - -o $@ $(LIBS)

# Kernels whose requests are known by hand, for tests/labs/test_see.sh
build/emu_see_kernels: tests/labs/see_kernels.cu $(wildcard tests/emulator/cuda_on_cpu*) build/emu_settings
	{ echo '#line 1 "see_kernels.cu"'; sed -f tests/emulator/cuda_on_cpu.sed $<; } | \
		$(EMU_BUILD) $(COUNTING) -fno-tree-sra -x c++ -c - -o $@.o
	$(CXX) $@.o -o $@ $(LIBS)

# What nvcc compiled, executed on the CPU: tests/ptx/ptx.h. PTX_SM='75 80 90': the architectures that nvcc compiles for.
PTX_SM = 80
PTX_OBJECTS = $(patsubst tests/ptx/%.cpp,build/ptx/%.o,$(wildcard tests/ptx/*.cpp))
PTX_BUILD = $(CXX) -std=c++20 -O2 -march=$(ARCH) -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-strict-aliasing \
	-fopenmp -Wall -Wextra -I$(dir $(NVCC))../include
# A register is 32 numbers of 4 bytes, so it needs a CPU with AVX2 and F16C.
HAVE_PTX = $(and $(HAVE_CUDA),$(call probe,$(HASH)ifndef __F16C__\n$(HASH)error\n$(HASH)endif\nint main(void) { \
	return 0; },-march=$(ARCH)))
ptx_programs = $(foreach sm,$(1),$(addprefix build/ptx/sm_$(sm)/,cnn $(GPU_PROGRAMS))) build/ptx/test_tensor
build/ptx_settings: SETTINGS = $(PTX_BUILD)
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

TESTED = $(or $(if $(SANITIZED),cnn-debug),$(if $(QUICK),build/cnn-quick),cnn)
# PARTS: only some parts of the tests, such as PARTS='unit/float program/test_cli.sh'.
# All that the parts of the tests use is built first: they run side by side, and two makes would collide.
HAVE_TORCH = $(shell tests/python_with.sh torch)
# Whether parts of this folder are wanted: without PARTS, all are.
parts_of = $(or $(filter $(1)/%,$(PARTS)),$(if $(PARTS),,all))
TEST_PROGRAMS = $(TESTED) $(if $(call parts_of,unit),build/test_float build/test_double) \
	$(if $(shell command -v $(CXX) 2>/dev/null),cnn-emu \
		$(if $(call parts_of,gpu),$(addprefix build/emu_,$(GPU_PROGRAMS) test_tensor))) \
	$(if $(and $(call parts_of,ptx),$(HAVE_PTX)),$(call ptx_programs,$(if $(QUICK),80,75 80 90))) \
	$(if $(call parts_of,robust),build/cnn-cpu) \
	$(if $(call parts_of,labs),$(if $(shell command -v $(CXX) 2>/dev/null),build/emu_see_kernels) \
		$(if $(HAVE_PTX),build/ptx/see_kernels)) \
	$(if $(and $(call parts_of,pytorch),$(HAVE_TORCH)),build/parity_float build/parity_double) \
	$(if $(QUICK),,$(if $(filter x86_64,$(shell uname -m)),build/bench-v3)) # quick: not needed
ifeq ($(wildcard tests/run_tests.sh),)
test test-all test-long:
	@echo "A starter has no tests of the whole project: run make check LAB=n"; exit 1
else
.PHONY: test-programs
test-programs:
	@$(MAKE) --no-print-directory -j $(shell nproc) $(TEST_PROGRAMS)
test: QUICK = 1
test test-all:
	@$(MAKE) --no-print-directory QUICK=$(QUICK) test-programs
	@CNN=./$(TESTED) QUICK=$(QUICK) AGAIN='make $@ $(filter-out PARTS=%,$(MAKEOVERRIDES))' tests/run_tests.sh $(PARTS)
# MINUTES: how long it may take; ROWS: only some of its rows, such as ROWS='fuzz soak'.
MINUTES = 60
test-long:
	@$(MAKE) --no-print-directory test-programs
	@MINUTES=$(MINUTES) tests/run_long.sh $(ROWS)
endif

# EMULATE=1: tiny networks in the emulator, without speeds.
ifneq ($(or $(KERNELS),$(VIRTUAL)),)
bench-gpu: $(if $(VIRTUAL),cnn-emu build/emu_bench_gpu,cnn build/bench_gpu)
	@EMULATE=$(VIRTUAL) tests/gpu/bench_gpu.sh
else
bench-gpu:
	@echo "make bench-gpu needs nvcc and a GPU; nvcc was not found: run make doctor"; exit 1
endif

# Lab 4: from which batch size on is a GPU faster? With EMULATE=1, or without CUDA, in the emulator.
# LARGEST: the largest batch size.
CROSSOVER = build/$(if $(and $(KERNELS),$(if $(VIRTUAL),,yes)),,emu_)crossover
build/crossover: labs/lab04/crossover.c $(SOURCE) $(KERNELS) build/settings build/link_settings
	$(GPU_TEST) $(KERNELS) -o $@ $(CUDA_LIBS) $(LIBS)
build/emu_crossover: labs/lab04/crossover.c $(SOURCE) build/emu_kernels.o build/settings
	$(GPU_TEST) build/emu_kernels.o -o $@ -lstdc++ $(LIBS)
crossover: $(CROSSOVER)
	@mkdir -p runs
	@$(CROSSOVER) runs/lab04-crossover.csv $(LARGEST)

# Lab 5: a convolution, one change at a time. In the emulator it counts what each kernel reads and writes.
CONVOLUTION = build/$(if $(and $(HAVE_CUDA),$(if $(VIRTUAL),,yes)),,emu_)convolution
build/convolution: labs/lab05/conv.cu build/kernel_settings build/link_settings
	$(NVCC_BUILD) -arch=$(call known_arch,$(CUDA_ARCH)) $< -o $@
build/emu_convolution: labs/lab05/conv.cu $(wildcard tests/emulator/cuda_on_cpu*) build/emu_settings
	{ echo '#line 1 "conv.cu"'; sed -f tests/emulator/cuda_on_cpu.sed $<; } | \
		$(EMU_BUILD) $(COUNTING) -fno-tree-sra -x c++ -c - -o $@.o
	$(CXX) $@.o -o $@ $(LIBS)
convolution: $(CONVOLUTION)
	@mkdir -p runs
	@$(CONVOLUTION) runs/lab05-convolution.csv $(IMAGES)

# One block of a kernel as it ran in the emulator, as a page (labs/tools/see.py). LAB=5: of the lab's convolution; else of
# a step of ./cnn-count, lab 4's or lab 6's or a training step, with OPTIONS. WITH: an earlier page, to be shown beside.
BLOCK  = 0
LAUNCH = 0
PAGE   = runs/see/$(KERNEL).html
SEE_STEP = $(if $(filter 4,$(LAB)),--model cifar --kernels naive --eval,--model lenet --epochs 1 --limit-train 2 \
	--batch-size 2 $(if $(filter 6,$(LAB)),--kernels naive)) --dataset synthetic --limit-test 1 --quiet $(OPTIONS)
SEE_PROGRAM = $(if $(filter 5,$(LAB)),build/emu_convolution,cnn-count)
SEE_SOURCE = $(if $(filter 5,$(LAB)),labs/lab05/conv.cu,cnn_kernels.cu)
see: $(if $(KERNEL),$(SEE_PROGRAM))
	@[ '$(KERNEL)' ] || { echo "make see: expected the name of a kernel, such as LAB=5 KERNEL=naive_kernel, found none"; exit 2; }
	@case '$(LAB)' in ''|[456]) ;; *) echo "make see: expected LAB=4, 5 or 6, or no LAB, found LAB=$(LAB)"; exit 2 ;; esac
	@mkdir -p build && rm -f build/see.txt
	@CUEMU_SEE='$(KERNEL)' CUEMU_SEE_BLOCK='$(BLOCK)' CUEMU_SEE_LAUNCH='$(LAUNCH)' CUEMU_SEE_FILE=build/see.txt \
		./$(SEE_PROGRAM) $(if $(filter 5,$(LAB)),build/see.csv,$(SEE_STEP)) >build/see.log 2>&1 && [ -f build/see.txt ] || \
		{ grep -E '^(cuda_on_cpu|cnn): ' build/see.log || tail -n 5 build/see.log; exit 1; }
	@$(call PYTHON_WITH,json) labs/tools/see.py build/see.txt --source $(SEE_SOURCE) $(if $(WITH),--with '$(WITH)') --out '$(PAGE)'

# Lab 6: how much of the loading and copying in a trace is hidden behind the device's work; overlap.txt beside it.
TRACE = runs/lab06/trace.json
build/overlap: labs/lab06/overlap.c build/settings
	$(BUILD) $< -o $@
overlap: build/overlap
	@build/overlap '$(TRACE)' >"$$(dirname '$(TRACE)')/overlap.txt" && cat "$$(dirname '$(TRACE)')/overlap.txt"

# Lab 10: a matrix product on tensor cores, one change at a time. SIZE: of the matrices
MATMUL = build/$(if $(and $(HAVE_CUDA),$(if $(VIRTUAL),,yes)),,emu_)matmul
build/matmul: labs/lab10/matmul.cu build/kernel_settings build/link_settings
	$(NVCC_BUILD) -arch=$(or $(GPU_SM),sm_80) $< -o $@
build/emu_matmul: labs/lab10/matmul.cu labs/check/lab10_counts.h $(wildcard tests/emulator/cuda_on_cpu*) build/emu_settings
	{ echo '#line 1 "matmul.cu"'; sed -f tests/emulator/cuda_on_cpu.sed $<; } | \
		$(EMU_BUILD) -O1 -fsanitize=thread -fno-tree-sra -DCUEMU_COUNT -include labs/check/lab10_counts.h -x c++ -c - -o $@.o
	$(CXX) $@.o -o $@ $(LIBS)
matmul: $(MATMUL)
	@mkdir -p runs
	@CUEMU_CORES=1 $(MATMUL) runs/lab10-matmul.csv $(SIZE)

# The race detector on every kernel: missing barriers, memory that two threads access at once.
races: cnn-emu
	@tests/gpu/test_cuda.sh races > build/races.txt; grep ^skip build/races.txt; ! grep ^fail build/races.txt
	@echo "No races in `grep -c ^pass build/races.txt` tests of the kernels, in three orders of threads"

clean:
	rm -rf build cnn cnn-debug cnn-emu cnn-count
