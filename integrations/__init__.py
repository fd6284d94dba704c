"""Where dtkernels meets other libraries. Each integration imports its library only when it is used."""
