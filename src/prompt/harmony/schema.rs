//! A tool's parameters: JSON schema as a TypeScript type.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Text of a bounded length.
pub(super) struct Type {
    text: String,
    max: usize,
}

impl Type {
    /// The type of a schema; what is past about `max` bytes is missing.
    pub fn of(schema: &Value, max: usize) -> String {
        let mut out = Type { text: String::new(), max };
        out.schema(schema, 0);
        out.text
    }

    fn push(&mut self, text: &str) {
        if self.text.len() <= self.max {
            self.text.push_str(text);
        }
    }

    fn indent(&mut self, spaces: usize) {
        if self.text.len() <= self.max {
            self.text.extend(std::iter::repeat_n(' ', spaces));
        }
    }

    fn is_full(&self) -> bool {
        self.text.len() > self.max
    }

    /// A line that starts with `//`.
    fn comment(&mut self, indent: usize, text: &str) {
        self.indent(indent);
        self.push("// ");
        self.push(text);
        self.push("\n");
    }

    fn schema(&mut self, schema: &Value, indent: usize) {
        if self.is_full() {
            return;
        }
        if let Some(variants) = schema["oneOf"].as_array() {
            return self.union(variants, indent);
        }
        if let Some(types) = schema["type"].as_array() {
            let names: Vec<&str> = types.iter().filter_map(Value::as_str).map(named).collect();
            if !names.is_empty() {
                return self.push(&names.join(" | "));
            }
        }
        match schema["type"].as_str() {
            Some("object") => self.object(schema, indent),
            Some("array") => match schema.get("items") {
                Some(items) => {
                    self.schema(items, indent);
                    self.push("[]");
                }
                None => self.push("Array<any>"),
            },
            Some("string") => self.string(schema),
            Some(name @ ("number" | "integer" | "boolean")) => self.push(named(name)),
            _ => self.push("any"),
        }
    }

    fn string(&mut self, schema: &Value) {
        let values = schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let values: Vec<String> = values.map(|value| format!("\"{value}\"")).collect();
        self.push(if values.is_empty() { "string" } else { "" });
        self.push(&values.join(" | "));
    }

    /// A schema that may also allow null in OpenAPI's way.
    fn nullable(&mut self, schema: &Value, indent: usize) {
        let start = self.text.len();
        self.schema(schema, indent);
        if schema["nullable"] == true && !self.text[start..].contains("null") {
            self.push(" | null");
        }
    }

    fn union(&mut self, variants: &[Value], indent: usize) {
        for variant in variants {
            self.push("\n");
            self.indent(indent);
            self.push(" | ");
            self.nullable(variant, indent + 3);
            let mut notes = Vec::new();
            notes.extend(variant["description"].as_str().map(str::to_owned));
            // A text is quoted here even among the values of an enum.
            notes.extend(variant.get("default").map(|default| match default {
                Value::String(text) if !is_enum(variant) => format!("default: \"{text}\""),
                default => format!("default: {default}"),
            }));
            self.notes(&notes);
        }
    }

    fn notes(&mut self, notes: &[String]) {
        if !notes.is_empty() {
            self.push(" // ");
            self.push(&notes.join(" "));
        }
    }

    fn object(&mut self, schema: &Value, indent: usize) {
        if let Some(description) = schema["description"].as_str() {
            self.comment(indent, description);
        }
        self.push("{\n");
        let empty = Map::new();
        let required = schema["required"].as_array().into_iter().flatten();
        let required: HashSet<&str> = required.filter_map(Value::as_str).collect();
        for (name, property) in schema["properties"].as_object().unwrap_or(&empty) {
            if self.is_full() {
                return;
            }
            self.property(name, !required.contains(name.as_str()), property, indent);
        }
        self.indent(indent);
        self.push("}");
    }

    fn property(&mut self, name: &str, optional: bool, property: &Value, indent: usize) {
        if let Some(title) = property["title"].as_str() {
            self.comment(indent, title);
            self.indent(indent);
            self.push("//\n");
        }
        let variants = property.get("oneOf");
        if let (None, Some(description)) = (variants, property["description"].as_str()) {
            self.comment(indent, description);
        }
        self.examples(property, indent);
        if let Some(variants) = variants.and_then(Value::as_array) {
            return self.choices(name, optional, property, variants, indent);
        }
        self.name(name, optional, indent);
        self.push(" ");
        self.nullable(property, indent + 4);
        self.push(",");
        if variants.is_none() {
            self.notes(&default(property).into_iter().collect::<Vec<_>>());
        }
        self.push("\n");
    }

    fn name(&mut self, name: &str, optional: bool, indent: usize) {
        self.indent(indent);
        self.push(name);
        self.push(if optional { "?:" } else { ":" });
    }

    fn examples(&mut self, property: &Value, indent: usize) {
        let Some(examples) = property["examples"].as_array().filter(|all| !all.is_empty()) else {
            return;
        };
        self.comment(indent, "Examples:");
        for example in examples.iter().filter_map(Value::as_str) {
            self.comment(indent, &format!("- \"{example}\""));
        }
    }

    /// A property that is one of several types, each on a line of its own.
    fn choices(
        &mut self,
        name: &str,
        optional: bool,
        property: &Value,
        variants: &[Value],
        indent: usize,
    ) {
        let own = property["description"].as_str();
        let of_first = variants.first().and_then(|first| first["description"].as_str());
        let above = own.filter(|_| own != of_first);
        if let Some(description) = above {
            self.comment(indent, description);
        }
        if let Some(default) = default(property) {
            self.comment(indent, &default);
        }
        self.name(name, optional, indent);
        self.push("\n");
        for (at, variant) in variants.iter().enumerate() {
            self.indent(indent);
            self.push(" | ");
            self.nullable(variant, indent + 3);
            let description = variant["description"].as_str();
            let repeated = (at == 0 && above.is_some()) || description == own;
            let mut notes = Vec::new();
            notes.extend(description.filter(|_| !repeated).map(str::to_owned));
            notes.extend(default(variant));
            self.notes(&notes);
            self.push("\n");
        }
        self.indent(indent);
        self.push(",\n");
    }
}

fn named(name: &str) -> &str {
    if name == "integer" { "number" } else { name }
}

fn is_enum(schema: &Value) -> bool {
    schema["enum"].as_array().is_some_and(|values| !values.is_empty())
}

/// What is said of a default: a text is quoted unless it is one of an enum.
fn default(schema: &Value) -> Option<String> {
    schema.get("default").map(|default| match default {
        Value::String(text) if is_enum(schema) => format!("default: {text}"),
        Value::String(text) => format!("default: \"{text}\""),
        default => format!("default: {default}"),
    })
}
