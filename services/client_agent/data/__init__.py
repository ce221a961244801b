"""An institution's samples: where they come from (config, source) and how they are split for training and testing.

client_agent.data.config.DataConfig                        the section `data` of the agent's configuration
client_agent.data.source.load(config, packages) -> Samples
client_agent.data.source.split(samples, classes, test_fraction, seed) -> (train, test)
client_agent.data.source.class_indices(labels, classes)
"""
