//! A chat template, compiled once.

use minijinja::Environment;
use minijinja::syntax::SyntaxConfig;
use serde_json::{Map, Value};

const NAME: &str = "chat";

pub(crate) struct Template {
    env: Environment<'static>,
}

impl Template {
    pub fn compile(source: &str) -> Result<Template, String> {
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true);
        let mut env = Environment::new();
        env.set_syntax(syntax.build().map_err(|error| error.to_string())?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_template_owned(NAME, source.to_owned()).map_err(|error| format!("{error:#}"))?;
        Ok(Template { env })
    }

    pub fn render(&self, variables: &Map<String, Value>) -> Result<String, String> {
        let template = self.env.get_template(NAME).map_err(|error| error.to_string())?;
        template.render(object(variables)).map_err(|error| error.to_string())
    }
}

fn object(map: &Map<String, Value>) -> minijinja::Value {
    minijinja::Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), convert(value))))
}

fn convert(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(value) => (*value).into(),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(int), _) => int.into(),
            (None, float) => float.unwrap_or_default().into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => items.iter().map(convert).collect(),
        Value::Object(map) => object(map),
    }
}
