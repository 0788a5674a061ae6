"""Model folders to compare on: models.py FOLDER TOKENIZERS CONFIG [GOLDEN].

TOKENIZERS: a folder with one for each tokenizer; CONFIG: a config.json that the engine loads. Writes
FOLDER/models.json, a list of {name, dir, template: path or null}: each tokenizer with its own template,
the project's templates, and those that the manifest in GOLDEN names.
"""

import json
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
OWN = ["calls", "python", "rules"]


def folder_of(package):
    name = re.sub("^npm:", "", package).rsplit("@", 1)[0]
    return re.sub("[^A-Za-z0-9._-]", "_", name.rsplit("tokenizer-", 1)[-1])


def config_of(source, config, to):
    """The engine makes a LlamaTokenizer anew, but not for models that are known to name it wrongly, as
    those with a byte-level vocabulary do: such a folder is said to be one of those."""
    with open(os.path.join(source, "tokenizer_config.json"), encoding="utf-8") as file:
        named = json.load(file).get("tokenizer_class", "")
    with open(os.path.join(source, "tokenizer.json"), encoding="utf-8") as file:
        wrongly = named.startswith("LlamaTokenizer") and "ByteLevel" in json.dumps(json.load(file)["pre_tokenizer"])
    if not wrongly:
        return config
    with open(config, encoding="utf-8") as file:
        own = {**json.load(file), "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    path = os.path.join(to, "phi3.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(own, file)
    return path


def link(source, config, to):
    os.makedirs(to, exist_ok=True)
    config = config_of(source, config, to)
    files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    for name, file in [*((name, os.path.join(source, name)) for name in files), ("config.json", config)]:
        path = os.path.join(to, name)
        if os.path.lexists(path):
            os.unlink(path)
        if os.path.exists(file):
            os.symlink(os.path.abspath(file), path)
    return to


def main(folder, tokenizers, config, golden=""):
    dirs = {"tiny": link(os.path.join(ROOT, "t/models/tiny"), config, os.path.join(folder, "tiny"))}
    for name in sorted(os.listdir(tokenizers)):
        source = os.path.join(tokenizers, name)
        if os.path.exists(os.path.join(source, "tokenizer_config.json")):
            dirs[name] = link(source, config, os.path.join(folder, name))
    models = []
    for name in dirs:
        with open(os.path.join(dirs[name], "tokenizer_config.json"), encoding="utf-8") as file:
            own = "chat_template" in json.load(file)
        if own or os.path.exists(os.path.join(dirs[name], "chat_template.jinja")):
            models.append({"name": name, "dir": dirs[name], "template": None})
    for name in OWN:
        path = os.path.abspath(os.path.join(ROOT, "fuzz/templates", f"{name}.jinja"))
        models.append({"name": f"own {name}", "dir": dirs["tiny"], "template": path})
    if golden:
        with open(os.path.join(golden, "manifest.json"), encoding="utf-8") as file:
            entries = json.load(file)
        for entry in entries:
            tokenizer = folder_of(entry["tokenizer"] or "tiny")
            template = os.path.abspath(os.path.join(golden, entry["template_file"]))
            models.append({"name": entry["name"], "dir": dirs.get(tokenizer, dirs["tiny"]), "template": template})
    with open(os.path.join(folder, "models.json"), "w", encoding="utf-8") as file:
        json.dump(models, file, indent=1)


main(*sys.argv[1:])
