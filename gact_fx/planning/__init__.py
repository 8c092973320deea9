"""From sensitivities and a budget to a plan: how every saved tensor is stored."""
