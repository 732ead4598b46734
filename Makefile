# SPDX-License-Identifier: MIT OR Apache-2.0
# The front door. Each target calls one script; what a target means is said here and by `make help`.
.DEFAULT_GOAL := help
.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: demo
demo: vm-env ## all-reduce real gradients over four endpoints in a virtual machine, and lose one of them on the way
	@scripts/demo

.PHONY: vm-env
vm-env: ## make the environment: a Debian 13 root folder, the stock kernel, a build directory for modules
	@scripts/vm-env

.PHONY: module
module: vm-env ## build pcieipc.ko against the stock kernel, in target/kmod/
	@scripts/build-module

.PHONY: test
test: vm-env ## run all tests, on the host and in virtual machines; the last line counts them
	@scripts/test

.PHONY: test-all
test-all: vm-env ## run all tests, and some of them on the kernel with every check, too
	@scripts/test --debug

.PHONY: chaos
chaos: vm-env ## all-reduce under a seeded schedule of faults (FAULTS=n SEED=s, KERNEL=debug); target/chaos/report.json
	@scripts/chaos

.PHONY: bench
bench: ## measure all-reduce beside Open MPI and Gloo, and fail where a bar is not met; target/bench/host.json
	@scripts/bench

.PHONY: test-torch
test-torch: vm-env ## test the Python package and the backend of torch.distributed, with Debian's torch
	@scripts/test-torch

.PHONY: bench-torch
bench-torch: vm-env ## measure training steps' gradients over the backend pcie beside gloo; target/bench/torch.json
	@scripts/bench-torch

.PHONY: lint
lint: vm-env ## check formatting, clippy on both sides, shell scripts and the ABI's layout
	@scripts/lint

.PHONY: bench-gpu
bench-gpu: ## check and measure all-reduce of CUDA memory on two devices of this host, beside NCCL and others
	@scripts/bench-gpu

.PHONY: vm-env-debug
vm-env-debug: ## add the kernel with every check to the environment (10 minutes, once)
	@scripts/vm-env-debug

.PHONY: test-debug
test-debug: ## run the tests in virtual machines on the kernel with every check
	@scripts/test-debug

.PHONY: build
build: ## build the command, the C library, manual pages and completions with this machine's cargo, in target/release
	@scripts/build-release

.PHONY: install
install: ## install what was built, and the module's sources for DKMS; DESTDIR, PREFIX and others as in scripts/install
	@scripts/install

.PHONY: uninstall
uninstall: ## take away what install put there
	@scripts/install --uninstall

.PHONY: deb
deb: ## build Debian packages in target/deb, and check them with lintian
	@scripts/build-deb

.PHONY: dist
dist: ## pack the sources in target/dist, the same bytes each time, with a list of what they contain
	@scripts/dist

.PHONY: bench-module
bench-module: vm-env ## measure the module beside vfio-pci and plain shared memory in a virtual machine; target/bench/module.json
	@scripts/bench-module

.PHONY: clean
clean: ## delete what was built; the environment in the cache stays
	rm -rf target tests/target userlib/target
