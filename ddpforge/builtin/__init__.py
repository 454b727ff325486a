"""The components that come with ddpforge; they obey the rules that plugins obey."""
