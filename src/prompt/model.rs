//! One served model: its folder, templates and tokenizer.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value};

use super::anthropic::Habits;
use super::completions::Gap;
use super::deepseek::DeepSeek;
use super::harmony::{self, Harmony};
use super::jinja::Template;
use super::json;
use super::python::{Dict, Json};
use super::tokenizer::Tokenizer;
use super::{Job, Limits, PromptError};
use crate::types::Skip;

/// The special tokens that a template sees.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Types and architectures of models whose prompts the engine makes by code of its own.
const BY_CODE: [(&str, &str, Maker); 8] = [
    ("gpt_oss", "GptOssForCausalLM", Maker::Harmony),
    ("deepseek_v32", "DeepseekV32ForCausalLM", Maker::DeepSeek(DeepSeek::V32)),
    ("deepseek_v4", "DeepseekV4ForCausalLM", Maker::DeepSeek(DeepSeek::V4)),
    ("deepseek_v4", "DeepseekV4ForConditionalGeneration", Maker::DeepSeek(DeepSeek::V4)),
    ("deepseek_v41", "DeepseekV41ForCausalLM", Maker::Unknown),
    ("kimi_k3", "KimiK3ForConditionalGeneration", Maker::Unknown),
    ("inkling", "InklingForCausalLM", Maker::Unknown),
    ("inkling", "InklingForConditionalGeneration", Maker::Unknown),
];

/// What makes the prompts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Template,
    Harmony,
    DeepSeek(DeepSeek),
    /// Code that is not known here.
    Unknown,
}

/// One `kvc_aware_model` line.
#[derive(Clone, Debug, Default)]
pub struct ModelSpec {
    pub name: String,
    /// Holds tokenizer.json, tokenizer_config.json and the chat template.
    pub dir: PathBuf,
    /// Other names of the same model.
    pub aliases: Vec<String>,
    /// Names of its LoRA adapters.
    pub loras: Vec<String>,
    /// Beats the folder's own chat template.
    pub template: Option<PathBuf>,
    /// The engine's `--default-chat-template-kwargs`.
    pub template_kwargs: Option<Map<String, Value>>,
    /// A folder that cannot be loaded is no error.
    pub optional: bool,
    /// An engine makes the tokens; there is no folder.
    pub remote: bool,
}

/// What a worker holds of a model.
pub(crate) struct Model {
    pub tokenizer: Tokenizer,
    templates: Templates,
    maker: Maker,
    harmony: Option<Harmony>,
    pub special_tokens: Dict,
    pub template_kwargs: Dict,
    habits: OnceLock<Result<Habits, Skip>>,
}

/// The chat templates of a folder.
enum Templates {
    None,
    /// The engine does not use a template for this model.
    Unused,
    Some {
        default: Box<Template>,
        with_tools: Option<Box<Template>>,
    },
}

impl Model {
    /// What makes the prompts instead of a template.
    pub fn harmony(&self) -> Option<&Harmony> {
        self.harmony.as_ref()
    }

    pub fn deepseek(&self) -> Option<DeepSeek> {
        if let Maker::DeepSeek(version) = self.maker { Some(version) } else { None }
    }

    /// What it takes a suffix with.
    pub fn gap(&self) -> Option<Gap> {
        self.deepseek().and_then(DeepSeek::gap)
    }

    /// The template for a request with or without tools.
    pub fn template(&self, tools: bool) -> Result<&Template, Skip> {
        match &self.templates {
            Templates::None => Err(Skip::Refused),
            Templates::Unused => Err(Skip::Unsupported),
            Templates::Some { default, with_tools } => {
                Ok(with_tools.as_ref().filter(|_| tools).unwrap_or(default))
            }
        }
    }

    /// Found once, without the limits of the request that asks first.
    pub fn habits(&self, job: &Job) -> Result<Habits, Skip> {
        let limits = Limits { max_text: usize::MAX, deadline: None };
        *self.habits.get_or_init(|| Habits::of(self, &Job { limits, now: job.now }))
    }
}

impl ModelSpec {
    /// Reads and checks every file without encoding anything and keeps nothing: cheap enough for
    /// `nginx -t`.
    pub fn check(&self) -> Result<(), PromptError> {
        if self.remote {
            return Ok(());
        }
        let folder = Folder::open(self)?;
        folder.templates().map(|_| ())
    }

    pub(crate) fn load(&self) -> Result<Model, PromptError> {
        let folder = Folder::open(self)?;
        let maker = folder.maker()?;
        let templates = folder.templates()?;
        let special_tokens = folder.special_tokens();
        let path = folder.path("tokenizer.json");
        let tokenizer = Tokenizer::load(folder.tokenizer, &folder.config)
            .map_err(|cause| PromptError::file(&path, cause))?;
        let template_kwargs = self.template_kwargs()?;
        let harmony = (maker == Maker::Harmony).then(|| Harmony::new(&template_kwargs));
        if harmony.is_some() {
            harmony::check(&tokenizer).map_err(|cause| PromptError::file(&path, cause))?;
        }
        Ok(Model {
            tokenizer,
            templates,
            maker,
            harmony,
            special_tokens,
            template_kwargs,
            habits: OnceLock::new(),
        })
    }

    fn template_kwargs(&self) -> Result<Dict, PromptError> {
        let Some(kwargs) = &self.template_kwargs else { return Ok(Dict::default()) };
        let text = Value::Object(kwargs.clone()).to_string();
        match json::parse(&text) {
            Ok(Json::Dict(kwargs)) => Ok(std::sync::Arc::unwrap_or_clone(kwargs)),
            _ => Err(PromptError::Model {
                name: self.name.clone(),
                cause: "\"template_kwargs\" cannot be read".to_owned(),
            }),
        }
    }
}

/// The files of a model's folder.
struct Folder<'a> {
    spec: &'a ModelSpec,
    tokenizer: Value,
    /// tokenizer_config.json; null where there is none.
    config: Value,
}

impl<'a> Folder<'a> {
    fn open(spec: &'a ModelSpec) -> Result<Folder<'a>, PromptError> {
        let path = spec.dir.join("tokenizer.json");
        let other = ["tekken.json", "tokenizer.model", "spiece.model"];
        let other = other.into_iter().find(|name| spec.dir.join(name).exists());
        if let Some(other) = other.filter(|_| !path.exists()) {
            let cause = format!("no such file; \"{other}\" alone is not supported");
            return Err(PromptError::file(&path, cause));
        }
        let tokenizer = read_json(&path)?;
        if tokenizer["model"].is_null() {
            return Err(PromptError::file(&path, "no \"model\" in it"));
        }
        let path = spec.dir.join("tokenizer_config.json");
        let config = if path.exists() { read_json(&path)? } else { Value::Null };
        Ok(Folder { spec, tokenizer, config })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.spec.dir.join(name)
    }

    fn special_tokens(&self) -> Dict {
        let mut tokens = Dict::default();
        for name in SPECIAL_TOKENS {
            let token = &self.config[name];
            if let Some(token) = token.as_str().or_else(|| token["content"].as_str()) {
                tokens.set(name, Json::str(token));
            }
        }
        tokens
    }

    fn templates(&self) -> Result<Templates, PromptError> {
        match self.maker()? {
            Maker::Unknown => Ok(Templates::Unused),
            // The engine asks its template what the model takes, and no more.
            Maker::Harmony => Ok(self.own_templates().unwrap_or(Templates::Unused)),
            Maker::DeepSeek(_) if self.spec.template.is_none() => Ok(Templates::None),
            Maker::DeepSeek(_) | Maker::Template => self.own_templates(),
        }
    }

    fn own_templates(&self) -> Result<Templates, PromptError> {
        if let Some(path) = &self.spec.template {
            let default = compile(path, &read(path)?)?;
            return Ok(Templates::Some { default, with_tools: None });
        }
        let path = self.path("chat_template.jinja");
        if path.exists() {
            let default = compile(&path, &read(&path)?)?;
            let path = self.path("additional_chat_templates/tool_use.jinja");
            let with_tools =
                if path.exists() { Some(compile(&path, &read(&path)?)?) } else { None };
            return Ok(Templates::Some { default, with_tools });
        }
        let path = self.path("chat_template.json");
        if path.exists()
            && let Some(source) = read_json(&path)?["chat_template"].as_str()
        {
            return Ok(Templates::Some { default: compile(&path, source)?, with_tools: None });
        }
        self.templates_of_config()
    }

    /// One template in tokenizer_config.json, or a list of named ones.
    fn templates_of_config(&self) -> Result<Templates, PromptError> {
        let path = self.path("tokenizer_config.json");
        let templates = &self.config["chat_template"];
        let named = |name: &str| {
            let list = templates.as_array()?;
            list.iter().find(|item| item["name"] == name)?["template"].as_str()
        };
        let default = templates.as_str().or_else(|| named("default"));
        let Some(default) = default else { return Ok(Templates::None) };
        let with_tools = named("tool_use").map(|source| compile(&path, source)).transpose()?;
        Ok(Templates::Some { default: compile(&path, default)?, with_tools })
    }

    /// By config.json where there is one, else by the vocabulary.
    fn maker(&self) -> Result<Maker, PromptError> {
        if self.path("tekken.json").exists() {
            return Ok(Maker::Unknown);
        }
        let path = self.path("config.json");
        if path.exists() {
            let config = read_json(&path)?;
            let named = &config["architectures"][0];
            // The engine goes by the architecture, but for harmony.
            let is = |(name, architecture, maker): &&(&str, &str, Maker)| {
                let by_type = named.is_null() || *maker == Maker::Harmony;
                if by_type { config["model_type"] == *name } else { named == architecture }
            };
            return Ok(BY_CODE.iter().find(is).map_or(Maker::Template, |(_, _, maker)| *maker));
        }
        let added = self.tokenizer["added_tokens"].as_array();
        let has = |token: &&str| {
            added.is_some_and(|added| added.iter().any(|known| known["content"] == **token))
        };
        Ok(if harmony::TOKENS.iter().all(has) { Maker::Harmony } else { Maker::Template })
    }
}

fn compile(path: &Path, source: &str) -> Result<Box<Template>, PromptError> {
    Template::compile(source).map(Box::new).map_err(|cause| PromptError::file(path, cause))
}

fn read(path: &Path) -> Result<String, PromptError> {
    fs::read_to_string(path).map_err(|error| PromptError::file(path, error))
}

fn read_json(path: &Path) -> Result<Value, PromptError> {
    serde_json::from_str(&read(path)?).map_err(|error| PromptError::file(path, error))
}
