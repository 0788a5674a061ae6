# NGINX=1.26, 1.28 or 1.30 picks one of the matrix instead of the installed nginx.
NGINX ?=
# For each target of `make fuzz`.
SECONDS ?= 600
# For `make parity`.
CASES ?= 5000
SEED ?= 1

.PHONY: help build test demo bench soak chaos asan coverage test-vllm loom golden parity fuzz fmt clean

help:
	@echo 'make build           target/ngx_http_kvc_aware_module.so for the installed nginx, or for'
	@echo '                     the tree in NGINX_SOURCE_DIR/NGINX_BUILD_DIR'
	@echo 'make build NGINX=1.28  the same for nginx 1.28, in target/1.28/'
	@echo 'make demo            four mock engines behind nginx, without and with the module'
	@echo 'make demo ENGINE=vllm  the same with real vLLM workers on the CPU'
	@echo 'make demo EVENTS=off   the same without the engines'"'"' events'
	@echo 'make test            format, lints, unit tests, then the suites on the installed nginx'
	@echo 'make test NGINX=1.28 the suites on nginx 1.28; also 1.26 and 1.30'
	@echo 'make bench           added latency, lookups and events, as ratios'
	@echo 'make soak            10,000 mixed requests, reloads, a killed engine: nothing may break'
	@echo 'make chaos           200 kills of the writer, 100 reloads, failing engines: nothing may fail or stay'
	@echo '                     behind; KILLS=, RELOADS=, EVENTS=, SEED='
	@echo 'make asan            the suites and clients that go away, on an nginx with sanitizers'
	@echo 'make coverage        lines of the domain that tests run: at least 90 of 100'
	@echo 'make golden GOLDEN_DIR=<folder>  prompts and ids against cases of a real engine'
	@echo 'make parity          CASES=5000 random requests and templates against the engine'"'"'s own code'
	@echo 'make test-vllm       predictions and policies on real vLLM workers on the CPU'
	@echo 'make loom            every interleaving of a reader and the writer of the index, in small models'
	@echo 'make fuzz            events, requests and templates that nobody wrote, SECONDS=600 each'
	@echo 'make fmt             format the sources'
	@echo 'make clean           remove what was built'
	@echo
	@echo 'Each installs the Debian packages that it needs.'

build:
	@scripts/build $(NGINX)

test:
	@scripts/test $(NGINX)

demo:
	@scripts/demo

bench:
	@scripts/bench

soak:
	@scripts/soak

chaos:
	@KILLS='$(KILLS)' RELOADS='$(RELOADS)' EVENTS='$(EVENTS)' SEED='$(SEED)' scripts/chaos

asan:
	@scripts/asan

coverage:
	@scripts/coverage

golden:
	@GOLDEN_DIR='$(GOLDEN_DIR)' scripts/golden

parity:
	@GOLDEN_DIR='$(GOLDEN_DIR)' scripts/parity $(CASES) $(SEED)

test-vllm:
	@t/vllm/run

# The models bring their own words, so that nothing else of the crate has to know loom; they are part
# of `make test`.
loom:
	cargo test --locked --no-default-features --lib index::tests::models

fuzz:
	@scripts/fuzz $(SECONDS)

fmt:
	cargo fmt

clean:
	cargo clean --quiet
	rm -rf target
