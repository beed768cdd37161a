# Included by the Makefile: the programs of labs 4 to 10, and make see.

# The programs of the labs run on a device, or in the emulator: with EMULATE=1, or where there is no nvcc.
lab_program = build/$(if $(and $(1),$(if $(VIRTUAL),,yes)),,emu_)$(2)

# After a program that has failed where it may have missed a GPU
WITHOUT_GPU = || { $(if $(or $(GPUS_HERE),$(findstring emu_,$<)),,echo "no NVIDIA GPU was found here; make $@ EMULATE=1 runs in the emulator" >&2;) exit 1; }

# Lab 4: from which batch size on is a GPU faster? LARGEST: the largest batch size
LAB_HOST = $(BUILD) $(DEFINES) -Wno-unused-function $<
build/crossover: labs/lab04/crossover.c $(SOURCE) $(KERNELS) build/settings build/link_settings
	$(LAB_HOST) $(KERNELS) -o $@ $(CUDA_LIBS) $(LIBS)
build/emu_crossover: labs/lab04/crossover.c $(SOURCE) build/emu_kernels.o build/settings
	$(LAB_HOST) build/emu_kernels.o -o $@ -lstdc++ $(LIBS)
crossover: $(call lab_program,$(KERNELS),crossover)
	@mkdir -p runs
	@$< runs/lab04-crossover.csv $(LARGEST) $(WITHOUT_GPU)

# A file of kernels of its own, in the emulator, which counts what each kernel reads and writes
define COUNT_KERNELS
{ echo '#line 1 "$(<F)"'; sed -f tests/emulator/cuda_on_cpu.sed $<; } | \
	$(EMU_BUILD) $(COUNTING) -fno-tree-sra -x c++ -c - -o $@.o
$(CXX) $@.o -o $@ $(LIBS)
endef

# Lab 5: a convolution, one change at a time
build/convolution: labs/lab05/conv.cu build/kernel_settings build/link_settings
	$(NVCC_BUILD) -arch=$(call known_arch,$(CUDA_ARCH)) $< -o $@
build/emu_convolution: labs/lab05/conv.cu $(EMULATOR) build/emu_settings
	$(COUNT_KERNELS)
convolution: $(call lab_program,$(HAVE_CUDA),convolution)
	@mkdir -p runs
	@$< runs/lab05-convolution.csv $(IMAGES) $(WITHOUT_GPU)

# Lab 6: how much of the loading and copying in a trace is hidden behind the device's work; overlap.txt beside it
TRACE = runs/lab06/trace.json
build/overlap: labs/lab06/overlap.c build/settings
	$(BUILD) $< -o $@
overlap: build/overlap
	@build/overlap '$(TRACE)' >"$$(dirname '$(TRACE)')/overlap.txt" && cat "$$(dirname '$(TRACE)')/overlap.txt"

# Lab 10: a matrix product on tensor cores, one change at a time. SIZE: of the matrices
build/matmul: labs/lab10/matmul.cu build/kernel_settings build/link_settings
	$(NVCC_BUILD) -arch=$(or $(GPU_SM),sm_80) $< -o $@
build/emu_matmul: labs/lab10/matmul.cu labs/check/lab10_counts.h $(EMULATOR) build/emu_settings
	$(COUNT_KERNELS)
build/emu_matmul: COUNTING = -O1 -fsanitize=thread -DCUEMU_COUNT -include labs/check/lab10_counts.h
matmul: $(call lab_program,$(HAVE_CUDA),matmul)
	@mkdir -p runs
	@CUEMU_CORES=1 $< runs/lab10-matmul.csv $(SIZE) $(WITHOUT_GPU)

# One block of a kernel as it ran in the emulator, as a page; `labs/tools/see.py --help` describes the variables.
BLOCK  = 0
LAUNCH = 0
PAGE   = runs/see/$(KERNEL).html
SEE_PROGRAM = $(if $(filter 5,$(LAB)),build/emu_convolution,cnn-count)
see: $(if $(KERNEL),$(if $(filter-out 4 5 6,$(LAB)),,$(SEE_PROGRAM)))
	@CUEMU_SEE='$(KERNEL)' CUEMU_SEE_BLOCK='$(BLOCK)' CUEMU_SEE_LAUNCH='$(LAUNCH)' PYTHON='$(call PYTHON_WITH,json)' \
		PAGE='$(PAGE)' WITH='$(WITH)' labs/tools/see_block.sh $(SEE_PROGRAM) '$(LAB)' $(OPTIONS)
