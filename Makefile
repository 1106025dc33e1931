# Everything a person or CI runs. Each target installs what it needs.
.PHONY: demo test miri lint ptx-toolchain gpu-check dist check-dist clean

CARGO ?= cargo
# ptxas, from NVIDIA's wheel: it assembles what rustc wrote, and says whether registers were spilled.
PTXAS_VENV := .venv
PTXAS ?= $(CURDIR)/$(PTXAS_VENV)/ptxas

# The crate of the guide's first kernel, which is outside of the workspace.
FIRST_KERNEL := docs/guide/first-kernel/Cargo.toml

# Without what the demo does not use: downloads and benchmarks; and with less effort on what it does not wait for. Numbers
# are the business of `model` and what that stands on.
DEMO_BUILD := --no-default-features --features bundled-demo \
	$(foreach krate,gpu-kernels host warpdraft zstd-sys,\
	--config 'profile.release.package.$(krate).opt-level=1')

# Complete a prompt with the bundled model, on a GPU if there is one. Leaves target/release/warpdraft, which downloads
# nothing: `cargo build --release --package warpdraft` makes the whole of it.
demo: ptx-toolchain
	@$(CARGO) build --release --package warpdraft $(DEMO_BUILD)
	@target/release/warpdraft generate --model demo --echo --max-tokens 86 --temperature 0 --file model/demo/prompt.txt

# All tests, formatting, lints and the crates' documentation. What is quick and often fails comes first; lints need the
# device build, beside which the build of all else has time.
test: ptx-toolchain $(PTXAS)
	$(CARGO) fmt --all --check
	$(CARGO) build --release --workspace --all-targets
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	$(CARGO) clippy --release --package warpdraft --no-default-features --features bundled-demo -- -D warnings
	$(CARGO) test --release --workspace --test docs --test manifests
	@$(MAKE) --no-print-directory --jobs=2 --output-sync $(ON_ONE_THREAD)
	$(CARGO) test --release --workspace
	$(CARGO) fmt --manifest-path $(FIRST_KERNEL) --all --check
	$(CARGO) clippy --release --manifest-path $(FIRST_KERNEL) --target-dir $${CARGO_TARGET_DIR:-target} \
		--workspace --all-targets -- -D warnings
	$(CARGO) test --release --manifest-path $(FIRST_KERNEL) --target-dir $${CARGO_TARGET_DIR:-target}
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --release --no-deps --package cuda_std --package host --package model

# Parts of `test` that have one thread each.
ON_ONE_THREAD := check-batch check-gemm check-standalone check-examples
.PHONY: $(ON_ONE_THREAD)
check-batch:
	target/release/examples/batch small
check-gemm:
	target/release/examples/gemm check-emulated
check-standalone:
	scripts/check-standalone.sh
check-examples:
	target/release/examples/generate_text
	target/release/examples/answer_batch
	target/release/examples/launch_kernel
	scripts/check-recipes.sh target/release/warpdraft

# What Miri can run (docs/reference/toolchain.md#miri), with a nightly compiler of this day. The emulator's addresses are
# numbers, of which pointers are made; the scheduler's random plans take hours, and so would all random cases of `model`.
MIRI := nightly-2026-05-20
MIRI_FLAGS := -Zmiri-disable-isolation -Zmiri-permissive-provenance
MIRI_RUN := $(CARGO) +$(MIRI) miri test --target-dir $${CARGO_TARGET_DIR:-target}/miri
MIRI_TEST := MIRIFLAGS='$(MIRI_FLAGS)' $(MIRI_RUN)
# Where `rayon` has threads: the memory of `crossbeam-epoch` below it is fine by Tree Borrows alone, and is not all given
# back. Two ways to a logit are compared bit for bit, and Miri would round `exp` at random.
MIRI_THREADS := MIRIFLAGS='$(MIRI_FLAGS) -Zmiri-tree-borrows -Zmiri-ignore-leaks -Zmiri-deterministic-floats' \
	$(MIRI_RUN)
miri:
	rustup toolchain install $(MIRI) --profile minimal --component miri --component rust-src
	$(MIRI_TEST) --package cuda_std --lib
	PROPTEST_CASES=4 $(MIRI_TEST) --package model --lib
	$(MIRI_THREADS) --package model --test it -- forward::
	$(MIRI_TEST) --package host --lib -- batch::backend batch::gpu::checked
	$(MIRI_TEST) --package host --test scheduler by_hand

# A compiler with the sources of `core`, for the device build (docs/reference/toolchain.md).
ptx-toolchain:
	@scripts/ptx-toolchain.sh

# From now on builds make machine code: what built without it is to be built again.
$(PTXAS):
	scripts/ptxas.sh $(PTXAS_VENV)
	touch host/build.rs benches/build.rs

# Packages for machines without a compiler, in dist/: a tarball, a .deb and a wheel; each is installed and run in a clean place.
# Machine code for Hopper is in them, since ptxas is there.
dist: ptx-toolchain $(PTXAS)
	$(CARGO) build --release --package warpdraft
	scripts/dist.sh $${CARGO_TARGET_DIR:-target}/release/warpdraft
	scripts/check-dist.sh

# Installs and runs the packages again.
check-dist:
	scripts/check-dist.sh

# Builds and packs what to run on a machine with a GPU, into dist/.
gpu-check: ptx-toolchain $(PTXAS)
	scripts/gpu-pack.sh

clean:
	$(CARGO) clean
	rm -rf dist $(PTXAS_VENV)
