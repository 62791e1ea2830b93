/* Loads the program as a module, and its MPI with it, for nobody else to see, and runs it. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **arguments) {
    void *module = dlopen(MODULE, RTLD_NOW | RTLD_LOCAL);
    int (*run)(int, char **) = NULL;
    if (module)
        *(void **)&run = dlsym(module, "main");
    if (!run) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    return run(count, arguments);
}
