"""What programs call: LLM, AsyncLLM, streams, conversations, scoring."""
