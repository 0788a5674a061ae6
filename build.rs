use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;
use std::{env, fs};

/// nginx versions at which something that the module uses changed, as `nginx_<version>` cfgs.
const VERSIONS: &[(u64, &str)] = &[
    // peers->config and peer->refs guard peers that `resolve` replaces
    (1_027_003, "nginx_1_27_3"),
    // keepalive is on by default and wraps peer.data
    (1_029_007, "nginx_1_29_7"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    for (_, name) in VERSIONS {
        println!("cargo::rustc-check-cfg=cfg({name})");
    }
    let known = env::var("DEP_NGINX_FEATURES_CHECK").unwrap_or_else(|_| "any()".into());
    println!("cargo::rustc-check-cfg=cfg(ngx_feature, values({known}))");

    if env::var_os("CARGO_FEATURE_NGINX").is_some() {
        nginx()?;
    }
    Ok(())
}

fn nginx() -> Result<(), Box<dyn Error>> {
    let version: u64 = env::var("DEP_NGINX_VERSION_NUMBER")?.parse()?;
    for (since, name) in VERSIONS {
        if version >= *since {
            println!("cargo::rustc-cfg={name}");
        }
    }
    for feature in env::var("DEP_NGINX_FEATURES")?.split(',') {
        println!("cargo::rustc-cfg=ngx_feature=\"{}\"", feature.trim());
    }

    // Threads of the module may outlive the dlclose of an nginx that exits.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    absent_symbols()
}

/// Unit tests run without nginx to resolve its symbols, and call none of them. A linker script,
/// linked by `cfg(test)` as the library `ngx_absent`, puts those that are left at address 0.
fn absent_symbols() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let mut names = BTreeSet::new();
    for folder in env::split_paths(&env::var_os("DEP_NGINX_INCLUDE").unwrap_or_default()) {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|e| e == "h") {
                let text = fs::read(entry.path())?;
                let words = text.split(|c| !(c.is_ascii_alphanumeric() || *c == b'_'));
                names.extend(words.filter(|w| w.starts_with(b"ngx_")).map(<[u8]>::to_vec));
            }
        }
    }
    let mut script = Vec::new();
    for name in names {
        script.extend_from_slice(b"PROVIDE(");
        script.extend_from_slice(&name);
        script.extend_from_slice(b" = 0);\n");
    }
    fs::write(out.join("libngx_absent.so"), script)?;
    println!("cargo::rustc-link-search=native={}", out.display());
    Ok(())
}
