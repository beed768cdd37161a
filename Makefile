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

# -fno-math-errno: sqrt() is one instruction. No option here changes floating-point semantics. -g1: the lines for perf and
# for backtraces; variables, which take a quarter of the compiler's time, are in cnn-debug.
OPT    = -O3
CFLAGS = -std=gnu17 $(OPT) -march=$(ARCH) -fno-math-errno -g1 -Wall -Wextra
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
# It does not if the C++ compiler is too new for it.
NVCC_WORKS := $(and $(NVCC),$(shell $(NVCC) -x cu -E - </dev/null >/dev/null 2>&1 && echo yes))
HAVE_CUDA := $(and $(NVCC_WORKS),$(call probe,$(HASH)include <cuda_runtime_api.h>\nint main(void) { int n; \
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
	return ncclGetVersion(&v); },-I$(dir $(NVCC))../include -L$(dir $(NVCC))../lib64 -lnccl))
endif

.PHONY: all help run test test-all test-long data bench bench-gpu debug emulate count ptx races overlap clean found \
	doctor cpu single multi study study-scaling study-workers ablation plots report verify starter check crossover \
	convolution matmul see gradescope FORCE
all: found cnn

CUDA_FOR = for $(CUDA_ARCH)
found:
	@echo "OpenMP: $(if $(OMP),found,$(if $(NO_OMP),disabled,not found: --kernels naive uses one thread))"
ifdef HIP
	@echo "HIP:    $(if $(HAVE_HIP),found$(comma) for AMD's $(HIP_ARCH),hipcc not found: CPU only)"
else
	@echo "CUDA:   $(if $(HAVE_CUDA),found$(comma) $(CUDA_FOR),$(if $(NO_CUDA),disabled,$(if $(NVCC),not usable$(comma) see make doctor,not found): CPU only))"
endif
	@echo "MPI:    $(if $(HAVE_MPI),found,$(if $(NO_MPI),disabled,not found: one machine only))"
	@echo "NCCL:   $(if $(HAVE_NCCL),found,$(if $(NO_NCCL),disabled,not found$(comma) or not needed: it connects GPUs of MPI ranks))"

define HELP
make             build ./cnn, for every GPU if nvcc is found, and show which optional parts were found
make run         train the MNIST network for one epoch, with what this machine can use
make data        download MNIST; INSTALL=1: may install Debian's Fashion-MNIST package
make test        run the tests, five to ten minutes on two cores; test-all, test-long: half an hour, an hour
make doctor      show what this machine provides, and how to get what is missing
make clean       remove everything that make built; runs/ is kept

make emulate     build ./cnn-emu, the GPU code on the CPU; count: ./cnn-count, which counts what kernels read and write
make debug       build ./cnn-debug, with the address and undefined-behavior sanitizers
make races       check the GPU kernels for data races, in the emulator
make see KERNEL=NAME  show what a block of a kernel reads and writes: labs/tools/see.py --help
make ptx         build programs that execute what nvcc compiled on the CPU
make bench       measure training, compared with PyTorch; bench-gpu: on the GPU

Timing study (variables: labs/tools/study.py --help)
make study       each device x BATCHES x REPEATS; other studies: study-scaling, study-workers, ablation
make cpu         one run on the CPU; single, multi: on one GPU, on two
make plots RUNS=DIR   draw the run folders in DIR; report: tables, plots and questions; verify: what is missing

Labs (labs/README.md)
make starter LAB=1 OUT=DIR   write the starter of a lab to DIR
make check LAB=1   run the lab's tests in its starter; TEST=2: only one
make report LAB=1  write the lab's tables, plots and questions to reports/; verify: what is missing there
make crossover   measure for lab 4; convolution: lab 5; overlap: lab 6; matmul: lab 10
make gradescope LAB=1   for teachers: the zip to upload as the lab's autograder

Variables: CC=clang ARCH=x86-64-v3 OPT=-O0 NO_OMP=1 NO_CUDA=1 NO_MPI=1 NO_NCCL=1 CUDA_ARCH=native HIP=1
endef
help:
	@: $(info $(HELP))

doctor:
	@CC='$(CC)' OMP='$(OMP)' NVCC='$(NVCC)' HAVE_CUDA='$(HAVE_CUDA)' HAVE_MPI='$(HAVE_MPI)' \
		HAVE_NCCL='$(HAVE_NCCL)' NVCC_WORKS='$(NVCC_WORKS)' slurm/doctor.sh

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
EMU_BUILD = $(CXX) -std=c++17 $(EMU_OPT) -march=$(ARCH) -g1 -I. -include tests/emulator/cuda_on_cpu.h \
	-fsanitize=alignment -fsanitize-undefined-trap-on-error
EMULATOR = $(wildcard tests/emulator/cuda_on_cpu*)
EMU_SOURCE = { echo '\#line 1 "cnn_kernels.cu"'; sed -f tests/emulator/cuda_on_cpu.sed cnn_kernels.cu; }
build/emu_kernels.o build/count_kernels.o: cnn_kernels.cu $(EMULATOR) build/declarations build/emu_settings
	$(EMU_SOURCE) | $(EMU_BUILD) $(COUNT) -x c++ -c - -o $@
# The hooks of the race detector are called for each load and store; this build counts them, and can record what a block
# loads and stores (make see). g++ 12 and newer also tell where a piece of code without a branch begins.
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

SANITIZE = -O1 -DUNROLL= -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
cnn-debug: $(SOURCE) build/settings
	$(BUILD) $(SANITIZE) -g $(DEFINES) cnn.c -o $@ $(LIBS)
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
STUDY   = $(if $(MODEL),--model $(MODEL)) --epochs $(EPOCHS) --gpus $(GPUS) $(if $(LIMIT),--limit $(LIMIT)) \
	$(if $(VIRTUAL),--emulate) $(if $(OPTIONS),-- $(OPTIONS))
# The first Python that has the package $(1). MPLBACKEND: matplotlib refuses the one that Jupyter sets in a terminal.
PYTHON_WITH = $(or $(shell for python in .venv/bin/python python3 /usr/bin/python3; do \
	MPLBACKEND=Agg $$python -c 'import $(1)' 2>/dev/null && echo $$python && break; done),python3)
PLOT = $(call PYTHON_WITH,matplotlib) labs/tools/plot.py

cpu single multi study study-scaling study-workers ablation: all $(if $(VIRTUAL),cnn-emu)
cpu single multi:
	@labs/tools/study.py train $@ runs --batches $(BATCH) $(STUDY)
study study-scaling study-workers ablation:
	@labs/tools/study.py $(MEASURED) $(STUDY)
	-@$(PLOT) '$(RUNS)'

study: MEASURED = run '$(RUNS)' --batches $(BATCHES) --repeats $(REPEATS)

study-scaling: MEASURED = scaling '$(RUNS)' --batches $(BATCH) --repeats $(REPEATS)
study-scaling: RUNS = runs/scaling-$(NAME)
study-scaling: BATCH = 256
study-scaling: REPEATS = 5

study-workers: MEASURED = workers '$(RUNS)' --workers $(WORKERS) --batches $(BATCH) --repeats $(REPEATS)
study-workers: RUNS = runs/workers-$(NAME)
study-workers: EPOCHS = 1
study-workers: REPEATS = 5

# Without MODEL=, the tool chooses one for the device that it finds.
ablation: MEASURED = ablation '$(RUNS)' --rungs '$(RUNGS)' --batches $(BATCH) --repeats $(REPEATS)
ablation: RUNS = runs/ablation-$(NAME:-%=%)$(if $(VIRTUAL),-emulated)
ablation: RUNGS = slurm/configs/ablation.txt
ablation: MODEL =
ablation: EPOCHS = 3
ablation: BATCH = 128
ablation: REPEATS = 3

plots:
	@$(PLOT) '$(RUNS)'
# LAB=n: of that lab's runs, in reports/
report verify: RUNS := $(if $(LAB),reports/lab$(if $(filter-out 10,$(LAB)),0)$(LAB),$(RUNS))
report:
	@$(if $(LAB),labs/tools/lab_runs.sh '$(LAB)')
	@$(PLOT) '$(RUNS)' | sed '/^not drawn: /d' # why, says make plots
	@$(call PYTHON_WITH,markdown_it) labs/tools/report.py '$(RUNS)'
verify:
	@$(if $(LAB),labs/tools/lab_runs.sh '$(LAB)')
	@labs/tools/verify.py '$(RUNS)'

# The labs. FROM is the folder to check: the starter itself by default; instructors give a student's.
starter:
	@labs/check/starter.sh '$(LAB)' '$(OUT)'
check:
	@CC='$(CC)' labs/check/check.sh '$(LAB)' $(TEST) # make exports FROM, if there is one
gradescope:
	@labs/gradescope/pack.sh '$(LAB)' $(if $(OUT),'$(OUT)')

data:
	INSTALL=$(INSTALL) data/get_data.sh mnist

build/bench: tests/bench/bench.c $(SOURCE) build/settings
	$(BUILD) -Wno-unused-function tests/bench/bench.c -o $@ $(LIBS)
bench: cnn build/bench
	@tests/bench/bench.sh

TESTED = $(or $(if $(SANITIZED),cnn-debug),$(if $(QUICK),build/cnn-quick),cnn)
# PARTS: only some parts of the tests, such as PARTS='unit/float program/test_cli.sh'.
ifeq ($(wildcard tests/run_tests.sh),)
test test-all test-long bench-gpu ptx:
	@echo "A starter has no tests of the whole project: run make check LAB=n"; exit 1
else
# The variables of this call, to repeat it. A blank in a value is a backslash and a blank in MAKEOVERRIDES; ^ stands for
# them while make separates words at blanks.
without_parts = $(subst ^,\$() ,$(filter-out PARTS=%,$(subst \$() ,^,$(MAKEOVERRIDES))))
test: QUICK = 1
test test-all:
	@$(MAKE) --no-print-directory QUICK=$(QUICK) test-programs
	@CNN=./$(TESTED) QUICK=$(QUICK) AGAIN='make $@ $(without_parts)' tests/run_tests.sh $(PARTS)
# MINUTES: how long it may take; ROWS: only some of its rows, such as ROWS='fuzz soak'.
MINUTES = 60
test-long:
	@$(MAKE) --no-print-directory test-programs
	@MINUTES=$(MINUTES) tests/run_long.sh $(ROWS)
endif

# The race detector on every kernel: missing barriers, memory that two threads access at once.
races: cnn-emu
	@tests/gpu/test_cuda.sh races > build/races.txt; grep ^skip build/races.txt; ! grep ^fail build/races.txt
	@echo "No races in `grep -c ^pass build/races.txt` tests of the kernels, in three orders of threads"

# The programs of the labs, and those that only the tests use, which a starter has not
-include labs/programs.mk tests/programs.mk

clean:
	rm -rf build cnn cnn-debug cnn-emu cnn-count
