//! `kvc_aware_zone`, `kvc_aware_model`, `kvc_aware_tokenizer_dir`, `kvc_aware_threads`.

use std::fs;
use std::path::Path;

use nginx_sys::{NGX_ERROR, ngx_parse_size, ngx_str_t};

use super::{Args, ConfError, Set, setters, split};
use crate::nginx::conf::{MainConf, RemoteConf, ZoneConf};
use crate::nginx::log::log;
use crate::nginx::zone;
use crate::prompt::ModelSpec;
use crate::remote::Key;
use crate::shared::MIN_ZONE_BYTES;

setters!(MainConf: zone => set_zone, model => set_model, tokenizer_dir => set_tokenizer_dir,
    threads => set_threads);

const MAX_THREADS: usize = 64;

fn set_zone(args: &Args, conf: &mut MainConf) -> Set {
    if conf.zone.is_some() {
        return Err(args.duplicate());
    }
    let value = args.get(1);
    let expected = "\"name:size\"";
    let (name, size) = value.rsplit_once(':').ok_or_else(|| args.value(value, expected))?;
    let mut word = ngx_str_t { len: size.len(), data: size.as_ptr().cast_mut() };
    // SAFETY: nginx only reads the word.
    let bytes = unsafe { ngx_parse_size(&mut word) };
    if name.is_empty() || bytes == NGX_ERROR as isize {
        return Err(args.value(value, expected));
    }
    let bytes = bytes.unsigned_abs();
    if bytes < MIN_ZONE_BYTES {
        return Err(args.text(format_args!(
            "zone \"{value}\" is too small in \"{}\" directive, it must be at least {}m",
            args.directive(),
            MIN_ZONE_BYTES >> 20
        )));
    }
    // SAFETY: called while the configuration is read.
    let shm = unsafe { zone::add(args.cf, name, bytes) }.ok_or(ConfError::Said)?;
    conf.zone = Some(ZoneConf { name: name.to_owned(), shm });
    Ok(())
}

/// In the place of a folder: an engine makes the tokens.
const REMOTE: &str = "remote";

fn set_model(args: &Args, conf: &mut MainConf) -> Set {
    let remote = args.get(2) == REMOTE;
    let mut spec = ModelSpec { name: args.get(1).to_owned(), remote, ..ModelSpec::default() };
    if !remote {
        spec.dir = args.path(args.get(2))?;
    }
    let (mut upstream, mut key) = (None, None);
    for parameter in args.after(2) {
        let names = |list: &str| -> Vec<String> { list.split(',').map(str::to_owned).collect() };
        match split(parameter) {
            ("alias", Some(list)) => spec.aliases.extend(names(list)),
            ("lora", Some(list)) => spec.loras.extend(names(list)),
            ("upstream", Some(name)) if remote && !name.is_empty() => {
                upstream = Some(name.to_owned());
            }
            ("key_file", Some(file)) if remote && !file.is_empty() => {
                key = Some(read_key(args, file)?);
            }
            ("template", Some(file)) if !remote && !file.is_empty() => {
                spec.template = Some(args.path(file)?);
            }
            ("template_kwargs", Some(json)) if !remote => {
                let parsed = serde_json::from_str(json).map_err(|_| {
                    args.value(parameter, "a JSON object after \"template_kwargs=\"")
                })?;
                spec.template_kwargs = Some(parsed);
            }
            ("optional", None) if !remote => spec.optional = true,
            _ => return Err(args.parameter(parameter)),
        }
    }
    check_names(args, conf, &spec)?;
    if let Err(error) = spec.check() {
        if !spec.optional {
            return Err(
                args.text(format_args!("model \"{}\" cannot be loaded: {error}", spec.name))
            );
        }
        log!(WARN, conf args.cf, "model \"{}\" is not available: {error}", spec.name);
    }
    if remote {
        let (model, place) = (spec.name.clone(), args.place());
        conf.remotes.push(RemoteConf { model, upstream, key, place, servers: Vec::new() });
    }
    conf.specs.push(spec);
    Ok(())
}

fn check_names(args: &Args, conf: &MainConf, spec: &ModelSpec) -> Set {
    let mut seen: Vec<&str> = conf.specs.iter().flat_map(names).collect();
    for name in names(spec) {
        if name.is_empty() {
            return Err(args.text("empty model name"));
        }
        if seen.contains(&name) {
            return Err(args.text(format_args!("model name \"{name}\" is already used")));
        }
        seen.push(name);
    }
    Ok(())
}

/// What a key file holds is never shown.
fn read_key(args: &Args, file: &str) -> Result<Key, ConfError> {
    let path = args.path(file)?;
    let text = fs::read_to_string(&path).map_err(|error| {
        args.text(format_args!("cannot read key file \"{}\": {error}", path.display()))
    })?;
    let no_key = || {
        args.text(format_args!("no key in \"{}\", it must be one line of ASCII", path.display()))
    };
    Key::read(&text).ok_or_else(no_key)
}

fn names(spec: &ModelSpec) -> impl Iterator<Item = &str> {
    let others = spec.aliases.iter().chain(&spec.loras);
    std::iter::once(spec.name.as_str()).chain(others.map(String::as_str))
}

fn set_tokenizer_dir(args: &Args, conf: &mut MainConf) -> Set {
    let dir = args.path(args.get(1))?;
    if conf.tokenizer_dir.is_some() {
        return Err(args.duplicate());
    }
    let specs = folders(&dir)
        .map_err(|error| args.text(format_args!("cannot read \"{}\": {error}", dir.display())))?;
    if specs.is_empty() {
        log!(WARN, conf args.cf, "no folder with a tokenizer.json in \"{}\"", dir.display());
    }
    for spec in specs {
        if let Err(error) = spec.check() {
            log!(WARN, conf args.cf, "model \"{}\" is not available: {error}", spec.name);
        }
        conf.folders.push(spec);
    }
    conf.tokenizer_dir = Some(dir);
    Ok(())
}

/// The models `name` and `org/name` in a folder, by name.
fn folders(dir: &Path) -> std::io::Result<Vec<ModelSpec>> {
    let mut found = Vec::new();
    let mut walk = vec![(dir.to_owned(), String::new())];
    while let Some((dir, prefix)) = walk.pop() {
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if !path.is_dir() || name.starts_with('.') {
                continue;
            }
            let name = format!("{prefix}{name}");
            if path.join("tokenizer.json").is_file() {
                found.push(ModelSpec { name, dir: path, optional: true, ..ModelSpec::default() });
            } else if prefix.is_empty() {
                walk.push((path, format!("{name}/")));
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn set_threads(args: &Args, conf: &mut MainConf) -> Set {
    let value = args.get(1);
    let threads = value
        .parse()
        .ok()
        .filter(|n| (1..=MAX_THREADS).contains(n))
        .ok_or_else(|| args.value(value, "a number from 1 to 64"))?;
    args.once(&mut conf.threads, threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_models_by_their_path() {
        let dir = std::env::temp_dir().join(format!("kvc-folders-{}", std::process::id()));
        for name in ["a", "org/b", "org/deep/c", ".git", "empty"] {
            fs::create_dir_all(dir.join(name)).unwrap();
            if name != "empty" {
                fs::write(dir.join(name).join("tokenizer.json"), "{}").unwrap();
            }
        }
        let names: Vec<String> = folders(&dir).unwrap().into_iter().map(|s| s.name).collect();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(names, ["a", "org/b"]);
        assert!(folders(&dir).is_err());
    }
}
