"""What a GPU machine can do, tried before anything is served there: `muxserve doctor --gpu`."""
