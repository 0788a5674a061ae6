//! One served model: its folder, template and tokenizer.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::PromptError;
use super::template::Template;
use super::tokenizer::Tokenizer;

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
}

impl ModelSpec {
    /// Reads and checks every file without encoding anything and keeps nothing: cheap enough for
    /// `nginx -t`.
    pub fn check(&self) -> Result<(), PromptError> {
        self.read_tokenizer()?;
        self.read_template().map(|_| ())
    }

    pub(crate) fn load(&self) -> Result<Model, PromptError> {
        let (path, json) = self.read_tokenizer()?;
        let tokenizer = Tokenizer::load(json).map_err(|cause| PromptError::file(&path, cause))?;
        let (template, special_tokens) = self.read_template()?;
        Ok(Model {
            tokenizer,
            template,
            special_tokens,
            template_kwargs: self.template_kwargs.clone().unwrap_or_default(),
        })
    }

    fn read_tokenizer(&self) -> Result<(PathBuf, Value), PromptError> {
        let path = self.dir.join("tokenizer.json");
        let other = ["tokenizer.model", "spiece.model", "tekken.json"];
        if !path.exists()
            && let Some(other) = other.into_iter().find(|name| self.dir.join(name).exists())
        {
            let cause = format!("no such file; \"{other}\" alone is not supported");
            return Err(PromptError::file(&path, cause));
        }
        read_json(&path).map(|json| (path, json))
    }

    fn read_template(&self) -> Result<(Option<Template>, Map<String, Value>), PromptError> {
        let path = self.dir.join("tokenizer_config.json");
        let config = if path.exists() { read_json(&path)? } else { Value::Null };
        let mut special_tokens = Map::new();
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            let token = &config[name];
            let token = token.as_str().or_else(|| token["content"].as_str());
            if let Some(token) = token {
                special_tokens.insert(name.to_owned(), token.into());
            }
        }
        let file = self.template.clone().unwrap_or_else(|| self.dir.join("chat_template.jinja"));
        let (file, source) = if self.template.is_some() || file.exists() {
            let source = read(&file)?;
            (file, Some(source))
        } else {
            (path, config["chat_template"].as_str().map(str::to_owned))
        };
        let template = source
            .map(|source| Template::compile(&source))
            .transpose()
            .map_err(|cause| PromptError::file(&file, cause))?;
        Ok((template, special_tokens))
    }
}

/// What a worker holds of a model.
pub(crate) struct Model {
    pub tokenizer: Tokenizer,
    pub template: Option<Template>,
    pub special_tokens: Map<String, Value>,
    pub template_kwargs: Map<String, Value>,
}

fn read(path: &Path) -> Result<String, PromptError> {
    fs::read_to_string(path).map_err(|error| PromptError::file(path, error))
}

fn read_json(path: &Path) -> Result<Value, PromptError> {
    serde_json::from_str(&read(path)?).map_err(|error| PromptError::file(path, error))
}
