"""Makes jax strict before any test module is imported: a reused key, a silent broadcast over ranks or a silent dtype
promotion is an error in tests."""

import jax

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
