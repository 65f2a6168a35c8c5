# What people type. CMakeLists.txt holds the list of sources.
#   make            build/trifold            NATIVE=1  instructions of this machine (-march=native)
#   make test       build and run all tests  BUILD=dir another build folder
#   make bench      benchmarks (scripts/bench.sh)            CUDA=off  without the GPU half, where a CUDA toolkit is installed
#                                                            ARCHS="80 90a 100a"  GPU architectures [that of the GPU found, else 90a]
BUILD  ?= build
NATIVE ?= 0
CUDA   ?= auto
ARCHS  ?=
JOBS   ?= $(shell nproc)
CMAKE_FLAGS = -DCMAKE_BUILD_TYPE=Release -DTRIFOLD_NATIVE=$(NATIVE) -DTRIFOLD_CUDA=$(CUDA) "-DTRIFOLD_ARCHS=$(subst $(eval) ,;,$(strip $(ARCHS)))"

all: configure
	@cmake --build $(BUILD) -j $(JOBS) --target trifold
configure:
	@cmake -S . -B $(BUILD) $(CMAKE_FLAGS) > $(BUILD).log || (cat $(BUILD).log; false)
	@rm -f $(BUILD).log
test: configure
	@cmake --build $(BUILD) -j $(JOBS)
	@scripts/run_tests.sh $(BUILD)
bench: all
	@scripts/bench.sh $(BUILD)
clean:
	rm -rf $(BUILD)
.PHONY: all configure test bench clean
