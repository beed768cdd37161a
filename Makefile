# cnn.c: `make run` trains, `make test` passes. `make help` tells the rest.
#
# Variables: CC=clang   ARCH=native|x86-64-v3|...   NO_OMP=1   NO_CUDA=1   NO_MPI=1
#            OPT=-O0 (no optimisation)   NO_NCCL=1   QUICK=1 (shorter tests)
#            CUDA_ARCH=native|sm_90|...  (all-major: every GPU that this nvcc knows, and later ones)

CC     = gcc
ARCH   = native
CUDA   ?= /usr/local/cuda
CUDA_ARCH = all-major

# -fno-math-errno: sqrt() as one instruction. Nothing here that changes what floating point means.
OPT    = -O3
CFLAGS = -std=gnu17 $(OPT) -march=$(ARCH) -fno-math-errno -g -Wall -Wextra
LIBS   = -lm -lpthread
-include labs/starter.mk # only in a starter of a lab
COMMIT := $(shell git describe --always --dirty 2>/dev/null || echo unknown)

HASH := \#
comma := ,
# An optional part is used if a program with it compiles and links; nothing is guessed from names.
probe = $(shell printf '$(1)' | $(CC) -x c - -o /dev/null $(2) 2>/dev/null && echo yes)
ifndef NO_OMP
OMP := $(call probe,$(HASH)include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; },-fopenmp)
endif
OMP_FLAGS := $(if $(OMP),-fopenmp,-Wno-unknown-pragmas)
ifndef NO_CUDA
NVCC := $(shell command -v nvcc 2>/dev/null || command -v $(CUDA)/bin/nvcc 2>/dev/null)
HAVE_CUDA := $(and $(NVCC),$(call probe,$(HASH)include <cuda_runtime_api.h>\nint main(void) { int n; \
	return cudaGetDeviceCount(&n) == 0; },-I$(dir $(NVCC))../include -L$(dir $(NVCC))../lib64 \
	-lcudart_static -lpthread -ldl -lrt))
endif
ifndef NO_MPI
MPI_FLAGS := $(wordlist 2,99,$(shell mpicc -show 2>/dev/null)) # what mpicc would add
HAVE_MPI := $(if $(MPI_FLAGS),$(call probe,$(HASH)include <mpi.h>\nint main(void) { return MPI_Init(0$(comma) 0); },\
	$(MPI_FLAGS)))
endif
MPI := $(if $(HAVE_MPI),-DCNN_MPI $(MPI_FLAGS))
ifndef NO_NCCL
HAVE_NCCL := $(and $(HAVE_CUDA),$(HAVE_MPI),$(call probe,$(HASH)include <nccl.h>\nint main(void) { int v; \
	return ncclGetVersion(&v); },-I$(CUDA)/include -L$(CUDA)/lib64 -lnccl))
endif

.PHONY: all help run test data bench bench-gpu debug emulate count races clean found doctor \
	cpu single multi study study-scaling study-workers plots report verify starter check crossover
all: found cnn

found:
	@echo "OpenMP: $(if $(OMP),found,$(if $(NO_OMP),left out,not found: one thread))"
	@echo "CUDA:   $(if $(HAVE_CUDA),found$(comma) for $(CUDA_ARCH),$(if $(NO_CUDA),left out,not found: CPU only))"
	@echo "MPI:    $(if $(HAVE_MPI),found,$(if $(NO_MPI),left out,not found: one machine only))"
	@echo "NCCL:   $(if $(HAVE_NCCL),found,$(if $(NO_NCCL),left out,not found or no use for it: it joins MPI ranks with GPUs))"

help:
	@echo "make         build ./cnn and say what was found"
	@echo "make doctor  what this machine has, and what to do about what is missing"
	@echo "make run     train the MNIST network for one epoch on the best data there is"
	@echo "make test    run all tests; QUICK=1 runs fewer shapes and epochs"
	@echo "make data    download MNIST (INSTALL=1: may install Debian's Fashion-MNIST package)"
	@echo "make bench   training speed, per cent of this machine's peak, next to PyTorch"
	@echo "make bench-gpu   the same on the GPU: training steps, and each operation by itself"
	@echo "make emulate build ./cnn-emu: the GPU's code on the CPU, to try and to check it"
	@echo "make count   build ./cnn-count: the same, and counts what each kernel reads and writes"
	@echo "make races   look for races in the GPU's kernels, in the emulator (a minute)"
	@echo "make debug   build ./cnn-debug with the address and undefined-behaviour sanitizers"
	@echo "make cpu     train as in a timing study, on the CPU; make single, make multi: on one GPU, on two"
	@echo "make study   the timing study: devices x BATCHES x REPEATS, study.csv and plots; it goes on if stopped"
	@echo "make study-scaling   1, 2, 4, ... devices: scaling.csv and a plot"
	@echo "make study-workers   WORKERS='1 2 4 8' threads that load images: workers.csv and a plot"
	@echo "             MODEL=cifar EPOCHS=20 BATCH=250 BATCHES='50 100' REPEATS=10 LIMIT=images GPUS=2 RUNS=folder"
	@echo "             OPTIONS='--width 64': more options of ./cnn; EMULATE=1: virtual GPUs where there are none"
	@echo "make plots RUNS=folder   draw what run folders tell"
	@echo "make report RUNS=folder  tables and plots of run folders in report.md, and questions for you"
	@echo "make verify RUNS=folder  what is missing or implausible there, before you hand it in"
	@echo "make gradescope LAB=1   for teachers: the zip to upload as that lab's autograder"
	@echo "make starter LAB=1 OUT=folder   the starter of a lab; labs/README.md tells what labs there are"
	@echo "make check LAB=1   a lab's tests, in its starter: points, and results.json; TEST=2: one of them"
	@echo "make crossover   lab 4: a layer on the CPU and on the GPU, from 1 image to 256; EMULATE=1 LARGEST=16"
	@echo "make clean   remove everything that make made, but not runs/"
	@echo "Variables: CC=clang ARCH=x86-64-v3 OPT=-O0 NO_OMP=1 NO_CUDA=1 NO_MPI=1 NO_NCCL=1 CUDA_ARCH=native QUICK=1"

doctor:
	@CC='$(CC)' OMP='$(OMP)' NVCC='$(NVCC)' HAVE_CUDA='$(HAVE_CUDA)' HAVE_MPI='$(HAVE_MPI)' \
		HAVE_NCCL='$(HAVE_NCCL)' slurm/doctor.sh

# Rebuilds when the settings change, not only when the source does.
BUILD = $(CC) $(CFLAGS) $(OMP_FLAGS)
NVCC_BUILD = $(NVCC) -std=c++17 -O3 -arch=$(CUDA_ARCH) -lineinfo $(if $(HAVE_NCCL),-DCNN_NCCL)
build/settings build/kernel_settings: FORCE
	@mkdir -p build
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@
build/settings: SETTINGS = $(BUILD) $(if $(HAVE_CUDA),CUDA) $(MPI) $(COMMIT)
build/kernel_settings: SETTINGS = $(NVCC_BUILD) $(EMU_BUILD)
.PHONY: FORCE
FORCE:

DEFINES = -DCNN_COMMIT='"$(COMMIT)"' -DCNN_FLAGS='"$(CFLAGS) $(OMP_FLAGS)"'
# The kernels read only the declarations of cnn.c: another change there does not compile them anew.
build/declarations: cnn.c FORCE
	@mkdir -p build
	@sed '/^#ifndef CNN_DECLARATIONS_ONLY/q' cnn.c | cmp -s - $@ || \
		sed '/^#ifndef CNN_DECLARATIONS_ONLY/q' cnn.c > $@

# cudart is linked statically: the program starts on a machine without a driver, too.
ifneq ($(HAVE_CUDA),)
KERNELS = build/cnn_kernels.o
CUDA_DEFINES = -DCNN_CUDA $(if $(HAVE_NCCL),-DCNN_NCCL)
CUDA_LIBS = -L$(dir $(NVCC))../lib64 -lcudart_static -lstdc++ -ldl -lrt \
	$(if $(HAVE_NCCL),-lnccl)
endif
build/cnn_kernels.o: cnn_kernels.cu build/declarations build/kernel_settings
	$(NVCC_BUILD) -c cnn_kernels.cu -o $@

cnn: cnn.c $(KERNELS) build/settings
	$(BUILD) $(DEFINES) $(CUDA_DEFINES) cnn.c $(KERNELS) -o $@ $(MPI) $(CUDA_LIBS) $(LIBS)

# The same two files on the CPU: tests/cuda_on_cpu.h plays the GPU. Two steps, since g++ compiles
# the kernels and gcc the rest.
CXX = g++
EMU_BUILD = $(CXX) -std=c++17 -O2 -march=$(ARCH) -g $(OMP_FLAGS) -Wno-unknown-pragmas -I. -include tests/cuda_on_cpu.h
EMU_SOURCE = { echo '\#line 1 "cnn_kernels.cu"'; sed -f tests/cuda_on_cpu.sed cnn_kernels.cu; }
build/emu_kernels.o build/count_kernels.o: cnn_kernels.cu $(wildcard tests/cuda_on_cpu*) \
		build/declarations build/kernel_settings
	$(EMU_SOURCE) | $(EMU_BUILD) $(COUNT) -x c++ -c - -o $@
# The race detector's hooks, called for each load and store, count them instead.
build/count_kernels.o: COUNT = -O1 -fsanitize=thread -DCUEMU_COUNT
cnn-emu: build/emu_kernels.o
cnn-count: build/count_kernels.o
cnn-emu cnn-count: cnn.c build/settings
	$(BUILD) $(DEFINES) -DCNN_CUDA cnn.c $(filter %_kernels.o,$^) -o $@ $(MPI) -lstdc++ $(LIBS)
count: cnn-count
emulate: cnn-emu

SANITIZE = -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
cnn-debug: cnn.c build/settings
	$(BUILD) $(SANITIZE) $(DEFINES) cnn.c -o $@ $(LIBS)
debug: cnn-debug

run: all
	./cnn --epochs 1

# The timing study. `labs/tools/study.py --help` tells what is measured, `plot.py --help` what is drawn.
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
PLOT = $(or $(shell for python in python3 /usr/bin/python3; do \
	$$python -c 'import matplotlib' 2>/dev/null && echo $$python && break; done),python3) labs/tools/plot.py

cpu single multi: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py train $@ runs --batches $(BATCH) $(STUDY)
study: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py run $(RUNS) --batches $(BATCHES) --repeats $(REPEATS) $(STUDY)
	-@$(PLOT) $(RUNS)
study-scaling: RUNS = runs/scaling-$(NAME)
study-scaling: BATCH = 256
study-scaling: REPEATS = 5
study-scaling: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py scaling $(RUNS) --batches $(BATCH) --repeats $(REPEATS) $(STUDY)
	-@$(PLOT) $(RUNS)
study-workers: RUNS = runs/workers-$(NAME)
study-workers: EPOCHS = 1
study-workers: REPEATS = 5
study-workers: all $(if $(VIRTUAL),cnn-emu)
	@labs/tools/study.py workers $(RUNS) --workers $(WORKERS) --batches $(BATCH) --repeats $(REPEATS) $(STUDY)
	-@$(PLOT) $(RUNS)
plots:
	@$(PLOT) $(RUNS)
report:
	-@$(PLOT) $(RUNS)
	@labs/tools/report.py $(RUNS)
verify:
	@labs/tools/verify.py $(RUNS)

# The labs. In a starter, FROM is the folder itself; instructors name a student's.
starter:
	@labs/check/starter.sh '$(LAB)' '$(OUT)'
check:
	@CC='$(CC)' FROM='$(FROM)' labs/check/check.sh '$(LAB)' $(TEST)
.PHONY: gradescope
gradescope:
	@labs/gradescope/pack.sh '$(LAB)' $(if $(OUT),'$(OUT)')

data:
	INSTALL=$(INSTALL) data/get_data.sh mnist

TEST_FLAGS = $(BUILD) -Wno-unused-function $(if $(SANITIZED),$(SANITIZE))
build/test_float: tests/test_cnn.c tests/check.h cnn.c build/settings
	$(TEST_FLAGS) tests/test_cnn.c -o $@ $(LIBS) -ldl
build/test_double: tests/test_cnn.c tests/check.h cnn.c build/settings
	$(TEST_FLAGS) -DREAL=double tests/test_cnn.c -o $@ $(LIBS) -ldl

build/parity_float: tests/parity.c cnn.c build/settings
	$(TEST_FLAGS) tests/parity.c -o $@ $(LIBS)
build/parity_double: tests/parity.c cnn.c build/settings
	$(TEST_FLAGS) -DREAL=double tests/parity.c -o $@ $(LIBS)

TESTED = $(if $(SANITIZED),cnn-debug,cnn)
TEST_PROGRAMS = $(addprefix build/,test_float test_double parity_float parity_double \
	$(if $(filter x86_64,$(shell uname -m)),bench-v3))
test: $(TESTED) $(TEST_PROGRAMS)
	@CNN=./$(TESTED) QUICK=$(QUICK) tests/run_tests.sh

build/bench: tests/bench.c cnn.c build/settings
	$(BUILD) -Wno-unused-function tests/bench.c -o $@ $(LIBS)
# For any CPU of the last ten years, so that valgrind can run it and counts compare between machines.
build/bench-v3: tests/bench.c cnn.c build/settings
	$(BUILD) -march=x86-64-v3 -Wno-unused-function tests/bench.c -o $@ $(LIBS)
bench: cnn build/bench
	@tests/bench.sh

# The tests and timings of the GPU's code: on a GPU, and with emu_ before their names in the emulator.
GPU_PROGRAMS = test_cuda bench_gpu
GPU_TEST = $(BUILD) $(DEFINES) -DCNN_CUDA -Wno-unused-function $<
$(addprefix build/,$(GPU_PROGRAMS)): build/%: tests/%.c tests/check.h cnn.c $(KERNELS) build/settings
	$(GPU_TEST) $(KERNELS) -o $@ $(CUDA_LIBS) $(LIBS)
$(addprefix build/emu_,$(GPU_PROGRAMS)): build/emu_%: tests/%.c tests/check.h cnn.c \
		build/emu_kernels.o build/settings
	$(GPU_TEST) build/emu_kernels.o -o $@ -lstdc++ $(LIBS)
ifdef KERNELS
bench-gpu: build/bench_gpu
	build/bench_gpu
else
bench-gpu:
	@echo "make bench-gpu needs nvcc and a GPU; none of CUDA was found"; exit 1
endif

# Lab 4: from how many images on is a GPU worth it? EMULATE=1, or without CUDA: in the emulator.
# LARGEST: the last batch.
CROSSOVER = build/$(if $(and $(KERNELS),$(if $(VIRTUAL),,yes)),,emu_)crossover
build/crossover: labs/lab04/crossover.c cnn.c $(KERNELS) build/settings
	$(GPU_TEST) $(KERNELS) -o $@ $(CUDA_LIBS) $(LIBS)
build/emu_crossover: labs/lab04/crossover.c cnn.c build/emu_kernels.o build/settings
	$(GPU_TEST) build/emu_kernels.o -o $@ -lstdc++ $(LIBS)
crossover: $(CROSSOVER)
	@mkdir -p runs
	@$(CROSSOVER) runs/lab04-crossover.csv $(LARGEST)

# The race detector on every kernel: barriers that are missing, numbers that two threads fight for.
races: cnn-emu
	@tests/test_cuda.sh races > build/races.txt; grep ^skip build/races.txt; ! grep ^fail build/races.txt
	@echo "No races in `grep -c ^pass build/races.txt` tests of the kernels, in three orders of threads"

clean:
	rm -rf build cnn cnn-debug cnn-emu cnn-count
