#!/bin/sh
# Builds every fuzz target and lets each run for a while over its corpus and what grows from it.
#
#   rust/fuzz/run.sh [target...]
#
# FUZZ_SECONDS  how long each runs (60)
# CARGO         cargo, as rustup's proxy (cargo)
#
# Where there is no nightly compiler, or no C++ compiler for libFuzzer, the corpus runs as plain tests instead. What is found is in
# rust/fuzz/artifacts/TARGET; after the fix it goes, minimised, into rust/fuzz/corpus/TARGET.
set -eu
cd "$(dirname "$0")"
cargo=${CARGO:-cargo}
seconds=${FUZZ_SECONDS:-60}
targets=${*:-$(ls fuzz_targets | sed 's/\.rs$//')}

if ! "$cargo" +nightly --version >/dev/null 2>&1 || ! command -v "${CXX:-c++}" >/dev/null; then
	echo "no nightly Rust toolchain (or no C++ compiler) here: the corpus runs as plain tests instead"
	exec "$cargo" test --locked -q --manifest-path ../core/Cargo.toml --test fuzz_corpus
fi

# What cargo-fuzz passes, so that it need not be installed; it finds the same layout.
host=$("$cargo" +nightly -vV | sed -n 's/^host: //p')
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
 -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address -Ccodegen-units=1 ${RUSTFLAGS:-}" \
	"$cargo" +nightly build --locked -q --release --bins --target "$host"

failed=
for target in $targets; do
	mkdir -p "target/grown/$target" "artifacts/$target"
	echo "$target: $seconds s"
	# A few hundred operations say as much as many, and sooner.
	case $target in stream | index_ops) longest=600 ;; *) longest=4096 ;; esac
	if ! "target/$host/release/$target" -max_total_time="$seconds" -timeout=20 -malloc_limit_mb=256 \
		-max_len=$longest -print_final_stats=1 -artifact_prefix="artifacts/$target/" \
		"target/grown/$target" "corpus/$target" >"target/$target.log" 2>&1; then
		failed="$failed $target"
		grep -m1 -A2 'panicked at' "target/$target.log" || tail -n 5 "target/$target.log"
		echo "$target: FAILED, see rust/fuzz/target/$target.log and rust/fuzz/artifacts/$target"
	else
		sed -n 's/^stat::number_of_executed_units: */  executed: /p' "target/$target.log"
	fi
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
