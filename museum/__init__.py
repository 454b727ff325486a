"""Museum of wrong training: known silent errors of the field as small cases, tried on ddpforge and other trainers."""
