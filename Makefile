# Thin: each target prints the plain command it runs, so that you can run it yourself.
# `make demo` and `make test` install what is missing (tests/tools/install); both need root.

SHELL := /bin/bash
TARGET ?= $(shell uname -m)-unknown-linux-musl
# One file for each says what differs.
TARGETS := $(shell sed -n 's/^TRIPLE := //p' targets/*/target.mk)
# Targets without releases, built apart, by the compiler that has std for them (tests/tools/second).
SECOND := $(shell sed -n 's/^TRIPLE := //p' targets/second/*/target.mk)
SECOND_BUILD = CARGO_TARGET_DIR=$(CURDIR)/target/second tests/tools/second
EDGE ?= $(shell uname -m)
BIN := $(CURDIR)/target/$(TARGET)/release
TOOLS := $(CURDIR)/target/tools
# Builds and runs what is in tests/runner/src/steps.rs.
RUNNER = cargo run --quiet --package coracle-runner --
SUITES = $(or $(SUITE),$(shell $(RUNNER) suites))
# Test targets that `cargo test` leaves out, and `--all-targets` with it.
NOT_SUITES := inside bench compare cluster peers workloads
# Those that run in guests.
GUEST_SUITES := lifecycle inside hostile nri images network faults conformance
# All crates but the monitor, which is no_std. What is built for tests has their features, as by `make test`: others would be
# another build of most crates.
CRATES := --workspace --exclude coracle-pod
TESTS := cargo test $(CRATES)
# Every release build alike: where this tree, cargo's sources and, if they are installed, those of std lie is kept out of the
# programs, so that two checkouts on two machines give the same bytes. The last as rustc itself names them where they are not.
CARGO_SOURCES := $(or $(CARGO_HOME),$(HOME)/.cargo)
STD_SOURCES = $(realpath $(shell rustc --print sysroot))/lib/rustlib/src/rust
STD_NAME = /rustc/$(shell rustc -vV | sed -n 's/^commit-hash: //p')
REMAP = $(CURDIR)=/coracle $(CARGO_SOURCES)=/cargo $(STD_SOURCES)=$(STD_NAME)
RUSTC_FLAGS = $(foreach pair,$(REMAP),"--remap-path-prefix=$(pair)",)
# The worker is in the program of the command line, which reads the name it is started by.
LINK_WORKER = ln -sf coracle target/$(1)/coracle-worker
RELEASE = cargo build --release --config 'target."cfg(target_env=\"musl\")".rustflags=[$(RUSTC_FLAGS)]'
ENVIRONMENT := CORACLE_BIN_DIR=$(BIN) PATH=$(TOOLS)/bin:$$PATH

.PHONY: help demo demo-programs demo-client test test-all monitor clippy inject simulate test-qemu power-cuts guests check deny docs build protocols convert programs probe run t fuzz bench bench-long bench-memory bench-steps bench-peers bench-guest compare peer-suites workloads cross other-programs dist reproducible edge-image edge-run edge-test cross-check cluster cluster-shell cluster-test cluster-sample cluster-restarts cluster-bad-day cluster-timing cluster-addons cluster-flannel conformance conformance-guest test-kubelet test-cri-tools node-conformance test-qemu-second second second-check clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

demo: ## a pod from nothing to gone, on any machine with Rust
	tests/tools/install demo
	@$(MAKE) --no-print-directory -j2 demo-programs demo-client
	target/debug/coracle-demo || { tests/tools/sweep; exit 1; }

# The programs of a release. The probe and the monitor first: one thread builds them most of the time, and crates of the client
# are built beside. The two large programs, which are linked last, have a thread each.
demo-programs:
	@$(MAKE) --no-print-directory probe
	@$(MAKE) --no-print-directory build

# It has the features of the tests, which use its crates again.
demo-client:
	cargo build $(CRATES) --bin coracle-demo

test: ## what a change must pass: unit tests, all suites on this machine, critest, a kubelet, a boot with a pod of each architecture
	$(RUNNER) test

test-all: ## everything, guests and a cluster too, or parts of it: make test-all [PARTS="qemu packaging"]
	$(RUNNER) all $(PARTS)

test-qemu: ## a test of the life-cycle suite in guests of both architectures: make test-qemu T=name
	@test -n "$(T)" || { echo 'make test-qemu T=name; all of them: make test-all PARTS="qemu more-guests"'; exit 2; }
	tests/tools/install qemu
	@$(MAKE) --no-print-directory guests GUEST_SUITES=lifecycle
	CORACLE_QEMU_ONLY="$(T)" $(TESTS) --test qemu life_cycle -- --nocapture

power-cuts: ## power cuts of a guest of each architecture during work and boot; half a minute each: make power-cuts [CUTS=100]
	tests/tools/install qemu
	@$(MAKE) --no-print-directory guests
	CORACLE_QEMU_CUTS=$(or $(CUTS),100) $(TESTS) --test qemu many_power_cuts -- --nocapture --include-ignored

second-check: ## armv7 and riscv64 compile
	tests/tools/install second
	@for target in $(SECOND); do set -e; \
		$(SECOND_BUILD) check --target $$target -p coracled -p coracle; \
		$(SECOND_BUILD) check --profile quick --target $$target -p coracle-pod; \
	done

second: ## static programs of armv7 and riscv64, and what they weigh
	tests/tools/install second
	@for target in $(SECOND); do set -e; \
		$(SECOND_BUILD) build --release --target $$target -p coracled -p coracle -p coracle-probe; \
		$(call LINK_WORKER,second/$$target/release); \
		$(SECOND_BUILD) build --release --target $$target -p coracle-pod; \
	done
	CARGO_TARGET_DIR=target/second packaging/sizes $(SECOND)

test-qemu-second: second ## the life cycle in a guest of armv7, not yet known to pass (targets/README.md): make test-qemu-second [T=name]
	tests/tools/install qemu-second
	$(SECOND_BUILD) test --no-run --profile client --target armv7-unknown-linux-musleabihf -p coracle-tests --test lifecycle
	CORACLE_QEMU_ONLY="$(T)" $(TESTS) --test qemu second_class -- --nocapture --include-ignored

guests: ## what a guest runs, for both targets: the programs and the suites
	@for target in $(TARGETS); do set -e; \
		$(RELEASE) --target $$target -p coracled -p coracle; \
		$(call LINK_WORKER,$$target/release); \
		$(RELEASE) --target $$target -p coracle-pod; \
		$(RELEASE) --target $$target -p coracle-probe; \
		cargo test --no-run --profile client --target $$target -p coracle-tests -p coracle-sandbox \
			$(addprefix --test ,$(GUEST_SUITES) cgroup_reference); \
	done

check: ## format, clippy, rustdoc, unit tests, house; under two minutes; without root it leaves out the tests that need it
	$(RUNNER) check

clippy:
	cargo clippy --quiet $(CRATES) --all-targets -- -D warnings
	cargo clippy --quiet --profile quick -p coracle-pod -- -D warnings
	cargo clippy --quiet $(CRATES) $(addprefix --test ,$(NOT_SUITES)) -- -D warnings

monitor: ## coracle-pod for unit tests, built in seconds
	cargo build -q --profile quick --target $(TARGET) -p coracle-pod

deny: ## licences, known vulnerabilities and sources of all crates (deny.toml); downloads the advisory database
	tests/tools/install deny
	PATH=$(TOOLS)/bin:$$PATH cargo deny check

docs: ## rustdoc of every crate; a link that does not resolve is an error
	RUSTDOCFLAGS="-D warnings" cargo doc -q $(CRATES) --no-deps --document-private-items
	RUSTDOCFLAGS="-D warnings" cargo doc -q -p coracle-pod --lib --no-deps --document-private-items

build: ## the programs, static, release
	$(RELEASE) --target $(TARGET) -p coracle-pod
	$(RELEASE) --target $(TARGET) -p coracled -p coracle
	$(call LINK_WORKER,$(TARGET)/release)

protocols: ## writes the Rust code of the CRI and of NRI beside their .proto files, after these or their compiler changed
	UPDATE=1 cargo test -q -p coracle-protocols

convert: ## coracle-convert, for the machine that builds images
	$(RELEASE) --target $(TARGET) -p coracle-convert

programs: ## what suites run: the programs with coracle-convert, which shares their crates, and the probe
	$(RELEASE) --target $(TARGET) -p coracled -p coracle -p coracle-convert
	@$(MAKE) --no-print-directory build probe
	packaging/sizes $(TARGET)

probe: ## the program inside the fixture images
	$(RELEASE) --target $(TARGET) -p coracle-probe

run: build ## the daemon in a scratch root, debug log
	tests/tools/run $(BIN)

t: ## tests by name with their output, programs built without LTO: make t T=name [SUITE=lifecycle]
	@test -n "$(T)" || { echo "make t T=name [SUITE=lifecycle]: T is a part of a test's name"; exit 2; }
	@tests/tools/known "$(T)" $(SUITES)
	cargo build -q --profile quick --target $(TARGET) -p coracled -p coracle -p coracle-convert -p coracle-probe
	@$(call LINK_WORKER,$(TARGET)/quick)
	@$(MAKE) --no-print-directory monitor
	CORACLE_BIN_DIR=$(CURDIR)/target/$(TARGET)/quick PATH=$(TOOLS)/bin:$$PATH \
		$(RUNNER) only "$(T)" $(SUITES)

inject: ## kill -9 and errors at every system call of a pod's life, in daemon, monitor and worker; some twenty minutes: make inject [T=name]
	tests/tools/install packages
	tests/tools/install servers
	tests/tools/install go-chunked
	@$(MAKE) --no-print-directory build probe
	CORACLE_INJECT=1 $(ENVIRONMENT) $(TESTS) -q --test faults -- --nocapture --test-threads=10 inject::$(T)

simulate: ## random histories of pods on a simulated node: make simulate [SECONDS=600] [SEED=n]
	CORACLE_SIMULATE_SECONDS=$(or $(SECONDS),600) CORACLE_SIMULATE_FROM=$(or $(FROM),0) CORACLE_SIMULATE_SEED=$(SEED) \
		cargo test -q --profile quick -p coracle-engine --test simulation -- --nocapture random_histories

fuzz: ## one fuzz target, ten minutes: make fuzz T=name [SECONDS=600]
	tests/tools/fuzz "$(T)" $(or $(SECONDS),600)

BENCH_ARCH = $(or $(ARCH),aarch64)
BENCH = $(ENVIRONMENT) cargo test -q --profile client -p coracle-tests --test bench --

bench: ## time and memory with their budgets, as one table; some twelve minutes; `update`, by its name only, half an hour: make bench [PARTS="idle life"]
	tests/tools/install bench
	$(if $(filter update,$(PARTS)),tests/tools/install bench-update)
	@$(MAKE) --no-print-directory build probe $(if $(filter update,$(PARTS)),convert)
	$(if $(filter update,$(PARTS)),$(subst PATH=,PATH=$(TOOLS)/containerd-now:,$(BENCH)),$(BENCH)) $(PARTS)

bench-long: ## ten thousand pods leave nothing: make bench-long [CYCLES=10000]
	tests/tools/install bench
	@$(MAKE) --no-print-directory build probe
	CYCLES=$(or $(CYCLES),10000) $(BENCH) long

hot-code: ## which functions of the daemon a kubelet uses: writes targets/hot-code.ld, by which the linker places them; a quarter of an hour
	tests/tools/install bench
	@CARGO_PROFILE_RELEASE_STRIP=false $(MAKE) --no-print-directory build
	@$(MAKE) --no-print-directory probe
	$(BENCH) hot
	@$(MAKE) --no-print-directory build

bench-memory: ## what each page of the daemon and of a monitor is for, and what a pod adds in the kernel
	tests/tools/install bench
	@$(MAKE) --no-print-directory build probe
	$(BENCH) memory

bench-steps: ## each call of a pod's life: its time, and what it asks of the kernel
	tests/tools/install bench
	@$(MAKE) --no-print-directory build probe
	$(BENCH) steps

bench-peers: ## the same beside another runtime, interleaved: make bench-peers [PARTS="host bridge"] [PEER=containerd|containerd-2|crio]
	tests/tools/install bench-peers $(PEER)
	@$(MAKE) --no-print-directory build probe
	CORACLE_PEER=$(PEER) $(if $(filter containerd-2,$(PEER)),$(subst PATH=,PATH=$(TOOLS)/containerd-now:,$(BENCH)),$(BENCH)) peers $(PARTS)

compare: ## the same input to containerd and coracle, any difference is a failure: make compare [PART=containers] [SECONDS=60] [SEED=…]
	tests/tools/install compare
	@$(MAKE) --no-print-directory build probe
	CORACLE_SEED=$(SEED) CORACLE_SECONDS=$(SECONDS) $(subst PATH=,PATH=$(TOOLS)/containerd-now:,$(ENVIRONMENT)) \
		$(TESTS) --test compare -- $(PART)

peer-suites: ## containerd's own CRI tests against coracle: make peer-suites [T=TestPodUserNS]
	tests/tools/install peer-suites
	@$(MAKE) --no-print-directory build probe
	$(subst PATH=,PATH=$(TOOLS)/containerd-now:,$(ENVIRONMENT)) $(TESTS) -q --test peers -- $(T)

workloads: ## what users run, under a kubelet with coracle and with containerd; the first downloads half a gigabyte: make workloads [T=postgres] [RUNTIME=coracle]
	tests/tools/install workloads
	@$(MAKE) --no-print-directory build probe
	CORACLE_WORKLOADS_RUNTIME=$(RUNTIME) $(subst PATH=,PATH=$(TOOLS)/containerd-now:,$(ENVIRONMENT)) \
		$(TESTS) --test workloads -- $(T)

bench-guest: ## the same in a guest, by ratios, counts and memory; an hour: make bench-guest [PARTS="idle life"] [ARCH=aarch64] [MEMORY=2048]
	tests/tools/install bench-guest
	@$(MAKE) --no-print-directory guests TARGETS=$(BENCH_ARCH)-unknown-linux-musl GUEST_SUITES="inside bench"
	CORACLE_BENCH_ARCH=$(BENCH_ARCH) CORACLE_BENCH_PARTS="$(PARTS)" CORACLE_BENCH_MEMORY=$(MEMORY) \
		$(TESTS) -q --test qemu bench_guest -- --nocapture --include-ignored

CLUSTER = $(ENVIRONMENT) $(TESTS) -q --test cluster --

cluster: ## a whole Kubernetes cluster with coracle, kept until Ctrl-C: make cluster [IMAGES=FILE.tar]; the first builds Kubernetes
	tests/tools/install cluster
	@$(MAKE) --no-print-directory build
	$(CLUSTER) up $(abspath $(IMAGES))

cluster-shell: ## a shell with kubectl in the cluster that runs
	@$(ENVIRONMENT) tests/cluster/shell

cluster-test: ## the cluster used as a user does; about a minute
	tests/tools/install cluster
	@$(MAKE) --no-print-directory build
	$(CLUSTER) test

cluster-sample: ## the cluster used as a user does, and a sample of the conformance suite; two specs at a time, because the control plane needs a processor, too
	tests/tools/install e2e
	@$(MAKE) --no-print-directory build
	PROCS=$(or $(PROCS),2) $(CLUSTER) sample

cluster-restarts: ## the cluster's kubelet killed 200 times during rolling updates; some fifteen minutes: make cluster-restarts [KILLS=200]
	tests/tools/install cluster
	@$(MAKE) --no-print-directory build
	KILLS=$(or $(KILLS),200) $(CLUSTER) restarts

cluster-bad-day: ## kubelet and coracle killed at random under updates, evictions, drains: make cluster-bad-day [MINUTES=60] [SEED=n]
	tests/tools/install cluster
	@$(MAKE) --no-print-directory build
	MINUTES=$(or $(MINUTES),60) CORACLE_SEED=$(SEED) $(CLUSTER) bad-day

cluster-timing: ## create to Running of 1, 60 and 110 pods; or 60 idle pods for a while: make cluster-timing [MINUTES=N] [RUNTIME=containerd]
	tests/tools/install cluster$(if $(filter containerd,$(RUNTIME)),-peer)
	@$(MAKE) --no-print-directory build probe
	MINUTES=$(MINUTES) RUNTIME=$(RUNTIME) $(subst PATH=,PATH=$(TOOLS)/containerd-now:,$(CLUSTER)) timing

cluster-addons: ## node_exporter and metrics-server on the cluster
	tests/tools/install cluster-addons
	@$(MAKE) --no-print-directory build
	$(CLUSTER) addons

cluster-flannel: ## the cluster with flannel as its network, used as a user does
	tests/tools/install cluster-flannel
	@$(MAKE) --no-print-directory build
	$(CLUSTER) flannel

conformance: ## Kubernetes' conformance suite on the cluster; an hour or more: make conformance [FOCUS=regex] [PROCS=4]
	tests/tools/install e2e
	@$(MAKE) --no-print-directory build
	FOCUS='$(FOCUS)' PROCS=$(or $(PROCS),4) $(CLUSTER) conformance

node-conformance: ## Kubernetes' node suite, its [NodeConformance] specs: make node-conformance [FOCUS=regex] [PROCS=4]
	tests/tools/install node-e2e
	@$(MAKE) --no-print-directory build
	FOCUS='$(FOCUS)' PROCS=$(or $(PROCS),4) $(CLUSTER) node-conformance

conformance-guest: ## the cluster in an x86_64 guest, with cgroup v2 and the kubelet's systemd driver, and a sample of the suite; it is emulated: make conformance-guest [FOCUS=regex]
	tests/tools/install conformance-guest
	@$(MAKE) --no-print-directory guests TARGETS=x86_64-unknown-linux-musl GUEST_SUITES=cluster
	CORACLE_FOCUS='$(FOCUS)' $(TESTS) -q --test qemu conformance_guest -- --nocapture --include-ignored

test-kubelet: ## tests/kubelet with another version's kubelet: make test-kubelet V=35.8
	tests/tools/kubelet-version "$(V)"

test-cri-tools: ## critest and tests/crictl with another version's programs: make test-cri-tools V=34.0
	tests/tools/cri-tools-version "$(V)"

cross: ## static programs of both targets, without a container engine; what they weigh
	tests/tools/install cross
	for target in $(TARGETS); do set -e; \
		$(RELEASE) --target $$target -p coracled -p coracle -p coracle-convert; \
		$(call LINK_WORKER,$$target/release); \
		$(RELEASE) --target $$target -p coracle-pod; \
	done
	packaging/sizes $(TARGETS)

dist: cross ## a release of both targets: archives, packages, an OCI image, SBOMs, SHA256SUMS, in target/dist
	tests/tools/install dist
	packaging/dist target/dist $(TARGETS)

reproducible: dist ## the last commit's release once more, elsewhere: the same bytes
	packaging/twice target/dist

other-programs: ## the programs that `make test` boots on the architecture that this machine is not, built in the shortest time
	tests/tools/install cross
	for target in $(filter-out $(TARGET),$(TARGETS)); do set -e; \
		cargo build --target $$target -p coracled -p coracle; \
		cargo build --target $$target -p coracle-pod --profile quick; \
		ln -sf ../quick/coracle-pod target/$$target/debug/coracle-pod; \
	done

edge-image: cross ## a small node with coracle for both targets: kernel, initramfs, disk, in target/edge
	tests/tools/install edge
	targets/edge/image $(notdir $(patsubst %/target.mk,%,$(wildcard targets/*/target.mk)))

edge-run: ## boots it, with its console here: make edge-run [EDGE=aarch64]
	targets/edge/run $(EDGE)

edge-test: edge-image ## boots both until a pod is up, and ends
	targets/edge/run --test x86_64
	targets/edge/run --test aarch64

cross-check: ## both targets compile
	tests/tools/install cross
	for target in $(TARGETS); do \
	  echo "cargo check --target $$target -p coracled -p coracle; … -p coracle-pod" && \
	  cargo check --target $$target -p coracled -p coracle && \
	  cargo check --profile quick --target $$target -p coracle-pod || exit 1; \
	done

clean: ## what was built
	cargo clean
