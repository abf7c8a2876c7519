# What needs guests runs as root; vm-images/setup.sh installs and builds what they take, once, into ~/.cache/thruway.

PREFIX ?= /usr/local
CARGO ?= cargo
export CARGO_TARGET_DIR = $(CURDIR)/target

SCRIPTS = vm-images/boot vm-images/setup.sh vm-images/build-* vm-images/lib.sh vm-images/linux-source.sh vm-images/guest/* .ci/run tests/run tests/demo \
	guest-kernel/build fuzz/run fuzz/rustc tests/dependencies tests/sanitized tests/miri \
	tests/guest/demo-init tests/guest/*.sh tests/host/run-case tests/host/*.sh

.PHONY: all build images tree guest-kernel guest-kernel-debug demo unit test soak neighbours bench check install clean fuzz fuzz-short asan tsan miri

all: build

build:
	$(CARGO) build --release

# The tree and the two-CPU kernel take some 10 minutes when the cache is empty.
images:
	vm-images/setup.sh

tree:
	vm-images/setup.sh tools tree

# Some 10 minutes each when the cache is empty.
guest-kernel:
	guest-kernel/build

guest-kernel-debug:
	guest-kernel/build x86_64 debug

demo: tree
	$(MAKE) build
	tests/demo

unit:
	$(CARGO) test

# The case that takes the two-CPU kernel builds it, beside others.
test: tree
	$(MAKE) unit build
	$(MAKE) fuzz-short miri
	tests/run

soak: tree
	$(MAKE) unit build
	tests/run --soak

# A hostile guest beside a good one, with the good one's times. ARGS=cold, for example, takes one attack.
neighbours:
	$(CARGO) test --release --test neighbours -- --measure $(ARGS)

# ARGS='--rounds 5', for example; --help tells all.
bench: tree
	$(CARGO) bench --bench guest -- $(ARGS)

# Ten seconds of each target; those that need root are left out without it.
fuzz-short:
	fuzz/run --seconds 10

# ARGS='--seconds 3600 --rounds 0 server', for example; fuzz/run tells all.
fuzz:
	fuzz/run $(ARGS)

# The tests that need no guest, under a sanitizer. Some minutes each.
asan tsan:
	tests/sanitized $@

# What parses bytes, under Miri. Left out, and said so, where there is no nightly with it.
miri:
	tests/miri

check:
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	tests/dependencies
	if command -v shellcheck >/dev/null; then shellcheck -x -P SCRIPTDIR $(SCRIPTS); else echo 'no shellcheck here: scripts are not checked'; fi

install: build
	install -D -m 755 target/release/thruwayd $(DESTDIR)$(PREFIX)/libexec/thruwayd
	install -D -m 644 50-thruway.json $(DESTDIR)$(PREFIX)/share/qemu/vhost-user/50-thruway.json
	sed -i 's|"binary": *"[^"]*"|"binary": "$(PREFIX)/libexec/thruwayd"|' $(DESTDIR)$(PREFIX)/share/qemu/vhost-user/50-thruway.json

clean:
	$(CARGO) clean
