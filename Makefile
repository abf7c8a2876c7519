# Targets that boot guests must run as root. vm-images/setup.sh builds what guests need, once, into ~/.cache/thruway.

PREFIX ?= /usr/local
CARGO ?= cargo
export CARGO_TARGET_DIR = $(CURDIR)/target
# How often cargo tries to download a crate: a registry may fail for some seconds.
export CARGO_NET_RETRY = 10

SCRIPTS = vm-images/boot vm-images/setup.sh vm-images/build-* vm-images/lib.sh vm-images/linux-source.sh vm-images/guest/* .ci/run tests/run tests/demo \
	guest-kernel/build qemu/build fuzz/run fuzz/rustc tests/circles tests/times tests/patches tests/dependencies tests/documented examples/qemu tests/sanitized tests/miri \
	packaging/build packaging/stage packaging/guest-kernel/apply packaging/deb/p* packaging/guest/p* \
	bench/xtask/scenes/fill bench/xtask/scenes/top tests/guest/demo-init tests/guest/*.sh tests/host/machine tests/host/*-guest tests/host/run-case tests/host/*.sh

.PHONY: all build tree tools guests images guest-kernel guest-kernel-debug qemu demo unit quick test cases soak neighbours bench pictures check lints docs install \
	programs static-programs static-agent packages release clean fuzz fuzz-short asan tsan miri

all: build

# The building machine's paths do not belong into programs: without them, the same source gives the same bytes everywhere.
remap = --remap-path-prefix=$(CURDIR)=/usr/src/thruway --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo
build programs static-programs: export RUSTFLAGS += $(remap)
static-programs: export RUSTFLAGS += -C target-feature=+crt-static $(if $(findstring aarch64-unknown-linux-musl,$(STATIC_TARGET)),-C linker=rust-lld)
# For users. Not the package thruway-bench's neighbour xtask.
programs static-programs: packages = --locked --package thruway --package thruway-bench --package thruway-tool --bins

build:
	$(CARGO) build --release --package thruway --bin thruwayd --package thruway-guest --bin thruway-guest

# TARGET=aarch64-unknown-linux-gnu: for arm64, by Debian's cross compiler.
programs static-programs: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER = $(if $(filter x86_64,$(shell uname -m)),aarch64-linux-gnu-gcc,cc)
programs:
	$(CARGO) build --release $(if $(TARGET),--target $(TARGET)) $(packages)

# With --target, the build scripts and macros stay as they are.
STATIC_TARGET ?= x86_64-unknown-linux-gnu
static-programs:
	$(CARGO) build --release --target $(STATIC_TARGET) $(packages)

# The guest agent alone, small: guests have little memory. With musl it needs no C compiler, so that it can be built for other machines.
static-agent: export RUSTFLAGS += $(remap) -C target-feature=+crt-static -C relocation-model=static $(if $(findstring musl,$(STATIC_TARGET)),-C linker=rust-lld)
static-agent:
	$(CARGO) build --locked --profile agent --target $(STATIC_TARGET) --package thruway-guest --bin thruway-guest

# In target/packages: a Debian package, an RPM, a static tarball, a container's files, the guest agent, and the guest kernel's patches. docs/install.md
# describes them. About 6 minutes on two CPUs, and on x86-64 5 more for arm64. ARGS selects some, for example ARGS=deb.
packages:
	vm-images/setup.sh cross-packages
	packaging/build $(ARGS)

# All packages of the last commit, from a clean clone, tried in guests, with their checksums. In target/release-tree/target/packages.
# About 30 minutes on two CPUs.
release_tree = target/release-tree
release:
	rm -rf $(release_tree)
	git clone --quiet . $(release_tree)
	$(MAKE) -C $(release_tree) packages
	$(release_tree)/vm-images/setup.sh tree tools uml-smp guest-kernel
	$(release_tree)/tests/run --soak packages_made
	cd $(release_tree)/target/packages && find . -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs -d '\n' sha256sum >SHA256SUMS
	git -C $(release_tree) log -1 --format='The packages of %H are in $(release_tree)/target/packages.'

tree tools:
	vm-images/setup.sh $@

# What most cases need, with low priority, since make test runs its first tests meanwhile.
guests:
	nice -n 19 vm-images/setup.sh tools tree
	nice -n 19 tests/times run build $(MAKE) build

# Everything that guests need. vm-images/setup.sh --missing says what is not there yet, and how long it takes.
images:
	vm-images/setup.sh

guest-kernel:
	guest-kernel/build

guest-kernel-debug:
	guest-kernel/build x86_64 debug

# QEMU whose vhost-user-fs-pci has windows. Not a part of make test: its cases that need it say so if it is not there.
qemu:
	qemu/build

# -j has no number: with one, make would ration cargo's jobs. Two jobs share the terminal, so
# cargo shows no progress bar.
demo:
	@echo 'make demo: about 2 minutes on two CPUs, or 30 seconds when the guest and the daemon are built'
	vm-images/setup.sh packages
	CARGO_TERM_PROGRESS_WHEN=never $(MAKE) -j tree build
	tests/demo

unit:
	tests/times run unit $(CARGO) test --workspace

# All tests without a guest.
quick:
	$(MAKE) unit
	$(MAKE) fuzz-short
	$(MAKE) miri

kernels = --step kernels 'vm-images/setup.sh uml-smp guest-kernel old-kernel'

# What guests need is built beside the unit tests, and the kernels beside the cases that need none of them: one of the two CPUs would
# often be idle otherwise.
test:
	@tests/times begin
	vm-images/setup.sh test-packages
	$(MAKE) -j unit guests
	@tests/run $(kernels) --step fuzz '$(MAKE) fuzz-short' --step miri '$(MAKE) miri'; \
		status=$$?; tests/times end; exit $$status

# The part of make test that boots guests.
cases:
	vm-images/setup.sh test-packages
	$(MAKE) guests
	tests/run $(kernels) $(ARGS)

soak:
	vm-images/setup.sh tools tree programs
	$(MAKE) unit build
	tests/run --soak

# Measures a good guest beside a hostile one. ARGS selects attacks, for example ARGS=cold.
neighbours:
	$(CARGO) test --release --test neighbours -- --measure $(ARGS)

# ARGS are its options, for example ARGS='--rounds 5' or ARGS=--help.
bench:
	vm-images/setup.sh tools tree
	$(MAKE) build
	$(CARGO) run --release --package xtask -- bench $(ARGS)

# Five seconds of each fuzz target. Targets that need root are skipped without it.
fuzz-short:
	fuzz/run --seconds 5

# ARGS are the options of fuzz/run, for example ARGS='--seconds 3600 --rounds 0 server'.
fuzz:
	fuzz/run $(ARGS)

# The tests without a guest under a sanitizer. Some minutes each.
asan tsan:
	tests/sanitized $@

# The parsers under Miri. Skipped, with a message, if there is no nightly toolchain with Miri.
miri:
	tests/miri

# A clippy of fuzz needs no libFuzzer, which takes a minute to compile. The path is never opened.
fuzz_clippy = RUSTFLAGS='--cfg fuzzing' CUSTOM_LIBFUZZER_PATH=/none/libfuzzer.a CARGO_TARGET_DIR=target/fuzz/check \
	$(CARGO) clippy --locked --manifest-path fuzz/Cargo.toml --all-targets

check: lints docs

docs:
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --document-private-items
	tests/documented

lints:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(fuzz_clippy) -- -D warnings
	@# The static programs' C library, whose types are not glibc's, and arm64, whose system calls are not those of x86-64.
	for target in aarch64-unknown-linux-musl x86_64-unknown-linux-musl; do \
		test -d "$$(rustc --print target-libdir --target $$target)" || continue; \
		exec $(CARGO) check --locked --target $$target --package thruway --package thruway-bench --package thruway-tool --bins; \
	done
	tests/dependencies
	tests/circles
	tests/patches
	@! git grep -nE '^.{121,}' -- '*.rs' || { echo 'make check: lines have at most 120 columns, comments too' >&2; exit 1; }
	@commits=$$(git merge-base HEAD origin/main 2>/dev/null) && commits=$$commits..HEAD || commits='-1 HEAD'; \
		! git log --no-merges --format=%s $$commits | grep -E '^.{73,}' || \
		{ echo 'make check: the subject of a commit has at most 72 characters' >&2; exit 1; }
	@! git grep -n '&& let ' -- '*.rs' || { echo 'make check: let chains need Rust 1.88, and Debian 13 has 1.85' >&2; exit 1; }
	if command -v shellcheck >/dev/null; then shellcheck -x -P SCRIPTDIR $(SCRIPTS); else echo 'make check: shellcheck is not installed: scripts are not checked'; fi

# Records the demo and thruway top in terminals and draws them, in docs/pictures. ARGS=demo or ARGS=top selects one, ARGS=--redraw
# records nothing. About 5 minutes.
pictures:
	vm-images/setup.sh test-packages tree
	$(CARGO) build --release --bin thruwayd --package thruway --package thruway-tool
	$(CARGO) run --release --package xtask -- pictures $(ARGS)

# No symbols are removed. The package of a distribution does not conflict with /usr/local.
install: programs
	packaging/stage "$(DESTDIR)" "$(PREFIX)" target/release

clean:
	$(CARGO) clean
