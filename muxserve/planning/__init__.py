"""From a fleet file to a plan of a cluster and back: the bridge between configuration, costs and `placement`."""
