"""Flow matching and DDPM for ddpforge, with the UNets and diffusion transformers of Hugging Face diffusers."""
