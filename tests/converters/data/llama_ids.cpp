// Print llama.cpp's token ids of texts, a line each, for make_llama_splits.py.
//
//     llama_ids VOCABULARY.gguf < TEXTS
//
// Every text is preceded by its number of bytes, a uint32.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "llama.h"

int main(int, char ** arguments) {
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    const llama_model * model = llama_model_load_from_file(arguments[1], params);
    if (!model) return 1;
    uint32_t size;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        std::string text(size, 0);
        if (fread(text.data(), 1, size, stdin) != size) return 1;
        std::vector<llama_token> ids(size + 1);
        const int count = llama_tokenize(
            llama_model_get_vocab(model), text.data(), size, ids.data(), ids.size(), false, true);
        for (int i = 0; i < count; i++) printf(i ? " %d" : "%d", ids[i]);
        printf("\n");
    }
}
