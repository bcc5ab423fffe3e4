"""What a recipe names, loaded or built: model, tokenizer, data, training arguments, engine."""
