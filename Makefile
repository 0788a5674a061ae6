# NGINX=1.28 picks one of the matrix instead of the installed nginx.
NGINX ?=

.PHONY: help build
help:
	@echo 'make build           target/ngx_http_kvc_aware_module.so for the installed nginx, or for'
	@echo '                     the tree in NGINX_SOURCE_DIR/NGINX_BUILD_DIR'

build:
	@scripts/build $(NGINX)
