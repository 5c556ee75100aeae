# SPDX-License-Identifier: MIT
# The front door. `make` builds, `make demo` shows, `make check` tests the most of it, `make test`
# all; meson does the work.

PREFIX ?= /usr/local
BUILD ?= build
# A folder that tools/collect-deps.sh filled, for servers without network.
DEPS ?= $(PENSTOCK_DEPS)

MESON_OPTIONS = --prefix $(abspath $(PREFIX)) $(if $(DEPS),-Ddeps=$(abspath $(DEPS)))

all: compile
	@python=; if [ -d $(BUILD)/python/penstock ]; then python=", $(BUILD)/python"; fi; \
	echo "built $(BUILD)/penstock, $(BUILD)/libpenstock.so$$python"

compile: $(BUILD)/build.ninja
	@said=$$(ninja -C $(BUILD) --quiet 2>&1) || { echo "$$said"; exit 1; }; \
	case $$said in ''|*'no work to do.') ;; *) echo "$$said" ;; esac

$(BUILD)/build.ninja:
	@PENSTOCK_DEPS='$(DEPS)' tools/setup.sh build
	@meson setup $(BUILD) $(MESON_OPTIONS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@rm -f $(BUILD).log

demo: compile
	@tools/demo.sh $(BUILD)

test:
	@tools/setup.sh test
	@tools/test.sh

check:
	@tools/setup.sh test
	@tools/test.sh --quick

install: compile
	@meson configure $(BUILD) --prefix $(abspath $(PREFIX)) --libdir lib >/dev/null
	@meson install -C $(BUILD) --tags runtime,devel,man --quiet >/dev/null
	@if [ "$$(id -u)" = 0 ]; then ldconfig; fi
	@echo "installed under $(abspath $(PREFIX)); programs find the library if its lib folder"
	@echo "is known to the linker (ldconfig, LD_LIBRARY_PATH or an rpath)"

uninstall:
	@ninja -C $(BUILD) --quiet uninstall >/dev/null
	@echo "removed what was installed last"

gpu-test: compile
	@tools/gpu-test.sh $(BUILD)

gpu-bench: compile
	@bench/gpu-bench.sh $(BUILD)

gpu-compare: compile
	@bench/gpu-compare.sh $(BUILD)

bench: compile
	@bench/host-bench.sh $(BUILD)

clean:
	rm -rf build build-asan build-tsan

.PHONY: all compile demo test check install uninstall gpu-test gpu-bench gpu-compare bench clean
